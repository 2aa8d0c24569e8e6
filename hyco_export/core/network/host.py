"""The host's part of head and SLM passes in real numbers: embeddings, rotary tables, masks, K/V rings between passes.

For calibration, parity and sample feeds, where the network is float or its integers are compared with float; the device
keeps its rings as bytes (`device.slm`). Also the stored K/V rows of an attention sink, and the SLM's spec from its
network and graphs. Pure numpy; runs any pass through one callable.

Legend: R rows of a pass, n tokens given (n <= R), W ring slots, N kv heads, d head dim, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.core.device_spec import GraphSpec, KvLayer, SlmSpec, to_integers
from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES, KvShape
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.ring import EMPTY, ring_span, rotary_tables, slot_positions, slots, visible
from hyco_export.errors import ArtifactError

Real = Mapping[str, np.ndarray]
Run = Callable[[Real], Real]  # one pass: real inputs -> real outputs, by name
Ids = Sequence[int] | np.ndarray
Recorded = Mapping[str, np.ndarray]
"""One sequence of hand-offs: e, h [T, H]; k.<type>, v.<type> [T, N, d]; real values."""
NO_PARENT = -1  # the row is a child of the newest committed position
PADDING_TOKEN = 0  # of rows beyond the given tokens: each sees the rings and itself, no other row sees it


class EmbeddingRows(Protocol):
    """Where embeddings come from: `core.tables.HostTables`, or arrays in tests."""

    def tokens(self, ids: np.ndarray) -> np.ndarray: ...

    def per_layer(self, ids: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class AttentionSink:
    """An attention sink: the token that begins every text (BOS) and its K/V rows [N, 1, d] by ring (`k.<i>`, `v.<i>`).

    The rows depend on nothing else, so a host may store them and never run the token. A model with an attention sink
    has activations at it far greater than at any other token, which would widen the range of every tensor.
    """

    token: int
    rows: Mapping[str, np.ndarray]


class SlmHost:
    """Rings and feeds of one sequence.

    Args:
        network: shapes, rings, spans and rotary frequencies.
        embeddings: scaled embedding rows.
        rows: R.
        mask_value: what hides a key.
        start: position of the first token it will be given; earlier positions do not exist for it.
        sink: stored rows of position 0; the first token given is then the one after (`start` must be 0).
    """

    def __init__(
        self,
        network: SlmNetwork,
        embeddings: EmbeddingRows,
        rows: int,
        mask_value: float,
        start: int = 0,
        sink: AttentionSink | None = None,
    ) -> None:
        self.network = network
        self.rows = rows
        self.length = start
        self._start = start
        self._embeddings = embeddings
        self._mask_value = mask_value
        self._rings = {
            f"{kind}.{layer.index}": np.zeros((layer.kv_heads, network.rings[layer.layer_type], layer.dim), np.float32)
            for layer in network.storing
            for kind in ("k", "v")
        }
        if sink is not None:
            for name, kept in sink.rows.items():
                self._rings[name][:, :1] = kept
            self.length += 1

    def feeds(self, tokens: Ids, parents: Sequence[int]) -> dict[str, np.ndarray]:
        """Real inputs of a pass over a forest on top of the rings; parents come before their children."""
        ids = np.full(self.rows, PADDING_TOKEN)
        ids[: len(tokens)] = tokens
        ancestors, positions = self._forest(parents)
        feeds: dict[str, np.ndarray] = {"embeds": self._embeddings.tokens(ids), **self._rings}
        if self.network.per_layer:
            feeds["per_layer"] = self._embeddings.per_layer(ids)
        for layer_type, capacity in self.network.rings.items():
            cos, sin = rotary_tables(positions, self.network.inv_freq[layer_type])
            feeds[f"cos.{layer_type}"], feeds[f"sin.{layer_type}"] = cos, sin
            feeds[f"mask.{layer_type}"] = self._mask(positions, ancestors, capacity, self.network.spans[layer_type])
        return feeds

    def commit(self, outputs: Real, rows: Sequence[int]) -> None:
        """Copy the new K/V of `rows` (a path, depth order) into the rings at the next positions."""
        for layer in self.network.storing:
            capacity = self.network.rings[layer.layer_type]
            places = slots(self.length, len(rows), capacity)
            for kind in ("k", "v"):
                self._rings[f"{kind}.{layer.index}"][:, places] = outputs[f"{kind}_new.{layer.index}"][:, list(rows)]
        self.length += len(rows)

    def append(self, run: Run, tokens: Ids) -> Real:
        """One pass over at most R consecutive tokens, all committed; its outputs."""
        outputs = run(self.feeds(tokens, range(NO_PARENT, len(tokens) - 1)))
        self.commit(outputs, range(len(tokens)))
        return outputs

    def _forest(self, parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ancestor-or-self matrix bool [R, R] and positions [R]; a padding row is its own root."""
        ancestors = np.eye(self.rows, dtype=bool)
        depth = np.zeros(self.rows, np.int64)
        for row, parent in enumerate(parents):
            if parent != NO_PARENT:
                ancestors[row] |= ancestors[parent]
                depth[row] = depth[parent] + 1
        return ancestors, self.length + depth

    def _mask(self, positions: np.ndarray, ancestors: np.ndarray, capacity: int, span: int | None) -> np.ndarray:
        """[R, W + R]: 0 where a row may look, the mask value elsewhere."""
        held = slot_positions(self.length, capacity)
        held = np.where(held < self._start, EMPTY, held)
        seen = np.concatenate([visible(positions, held, span), ancestors & visible(positions, positions, span)], axis=1)
        return np.where(seen, 0.0, self._mask_value).astype(np.float32)


def on_grid(recorded: Recorded, encodings: Mapping[str, Encoding]) -> dict[str, np.ndarray]:
    """The values after each tensor was quantised and dequantised by its encoding."""
    return {name: encodings[name].dequantize(encodings[name].quantize(values)) for name, values in recorded.items()}


def ring_positions(root: int, window: int) -> np.ndarray:
    """Position in each slot [W] of the device's ring when it drafts for `root`."""
    return slot_positions(root, window)


def shared_positions(roots: np.ndarray, window: int) -> np.ndarray:
    """Positions [W + R - 1] that consecutive roots [R] see between them; EMPTY before the sequence."""
    width = window + len(roots) - 1
    positions = np.arange(roots[-1] - width, roots[-1])
    return np.where(positions < 0, EMPTY, positions)


def draft_feeds(
    network: HeadNetwork, recorded: Recorded, roots: np.ndarray, keys: np.ndarray, mask_value: float
) -> dict[str, np.ndarray]:
    """Real inputs for drafting at `roots` [R] (each >= 1) with K/V of positions `keys` [S] in this order."""
    feeds = {"e": recorded["e"][roots], "h": recorded["h"][roots - 1]}
    exists = (keys != EMPTY)[:, None, None]
    for layer_type in LAYER_TYPES:
        cos, sin = rotary_tables(roots, network.architecture.inv_freq[layer_type])
        feeds[f"cos.{layer_type}"], feeds[f"sin.{layer_type}"] = cos, sin
        for kind in ("k", "v"):
            rows = np.where(exists, recorded[f"{kind}.{layer_type}"][keys], np.float32(0.0))  # [S, N, d]
            feeds[f"{kind}.{layer_type}"] = np.ascontiguousarray(rows.transpose(1, 0, 2))
        span = ring_span(network.architecture.spans[layer_type], network.window)
        seen = visible(roots, keys, span) & (keys[None] < roots[:, None])  # roots of one sequence stand side by side
        feeds[f"mask.{layer_type}"] = np.where(seen, 0.0, mask_value).astype(np.float32)
    return feeds


def write_attention_sink(path: Path, sink: AttentionSink, tree: GraphSpec) -> None:
    """Store the sink's rows as integers of the tree graph's ring inputs."""
    rings = [spec for spec in tree.inputs if spec.name in sink.rows]
    save_file(to_integers(rings, sink.rows), path)


def read_attention_sink(path: Path) -> dict[str, np.ndarray]:
    """Stored rows uint8 [N, 1, d] by ring.

    Raises:
        ArtifactError: missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build it again: hyco-export convert-slm") from error


def slm_spec(
    network: SlmNetwork,
    vocab_size: int,
    keepset_digest: str,
    mask_value: float,
    tree: GraphSpec,
    prefill: GraphSpec,
    opening_token: int | None = None,
) -> SlmSpec:
    """The spec stored beside the graphs; rows are read from their inputs."""
    return SlmSpec(
        rows=tree.input("embeds").shape[0],
        prefill_rows=prefill.input("embeds").shape[0],
        vocab_size=vocab_size,
        keepset_digest=keepset_digest,
        hidden=network.hidden,
        per_layer_width=network.per_layer * len(network.layers),
        rings=network.rings,
        spans=network.spans,
        inv_freq=network.inv_freq,
        layers=tuple(
            KvLayer(layer.index, layer.layer_type, KvShape(layer.kv_heads, layer.dim)) for layer in network.storing
        ),
        mask_value=mask_value,
        tree=tree,
        prefill=prefill,
        opening_token=opening_token,
    )
