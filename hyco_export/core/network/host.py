"""The host's part of head and SLM passes: embeddings, rotary tables, masks, K/V rings between passes.

One arithmetic for the device, whose rings are integers, and for calibration, parity and sample feeds, whose rings are
real. Also the stored K/V rows of an attention sink, and the SLM's spec from its network and graphs. Pure numpy.

Legend: R rows of a pass, n tokens given (n <= R), S keys, W ring slots, N kv heads, d head dim, H hidden.
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
from hyco_export.core.ring import (
    EMPTY,
    NO_PARENT,
    ancestor_mask,
    held_positions,
    ring_span,
    rotary_tables,
    slots,
    visible,
)
from hyco_export.errors import ArtifactError

Real = Mapping[str, np.ndarray]
Run = Callable[[Real], Real]  # one pass: real inputs -> real outputs, by name
Ids = Sequence[int] | np.ndarray
Recorded = Mapping[str, np.ndarray]
"""One sequence of hand-offs: e, h [T, H]; k.<type>, v.<type> [T, N, d]; real values."""
PADDING_TOKEN = 0  # of rows beyond the given tokens


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


def root_inputs(
    roots: np.ndarray,
    keys: np.ndarray,
    spans: Mapping[str, int | None],
    inv_freq: Mapping[str, Sequence[float]],
    mask_value: float,
) -> dict[str, np.ndarray]:
    """Rotary tables and masks [R, S] of the head at `roots` [R] over K/V of positions `keys` [S] in this order.

    A root does not see itself, and no key after it: roots of one sequence may stand side by side.
    """
    real: dict[str, np.ndarray] = {}
    for layer_type, span in spans.items():
        seen = visible(roots, keys, span) & (keys[None] < roots[:, None])
        real |= _attention_inputs(layer_type, roots, seen, inv_freq[layer_type], mask_value)
    return real


def _attention_inputs(
    layer_type: str, positions: np.ndarray, seen: np.ndarray, inv_freq: Sequence[float], mask_value: float
) -> dict[str, np.ndarray]:
    """Rotary tables [R, d] of positions [R]; the mask of seen [R, S]: 0 where a row may look, else the mask value."""
    cos, sin = rotary_tables(positions, inv_freq)
    mask = np.where(seen, 0.0, mask_value).astype(np.float32)
    return {f"cos.{layer_type}": cos, f"sin.{layer_type}": sin, f"mask.{layer_type}": mask}


class SlmAttention(Protocol):
    """What decides where a row stands and what it sees: an `SlmNetwork`, or the `SlmSpec` that the device reads."""

    @property
    def rings(self) -> Mapping[str, int]: ...

    @property
    def spans(self) -> Mapping[str, int | None]: ...

    @property
    def inv_freq(self) -> Mapping[str, Sequence[float]]: ...


class SlmInputs:
    """The K/V rings of one sequence, and the inputs of a pass on top of them.

    Rings hold what the graph's K/V outputs hold, reals or integers: rows are only copied.

    Args:
        slm: rings, spans and rotary frequencies.
        embeddings: scaled embedding rows.
        empty: rings [N, W, d] that hold 0.0, by input name (`k.<i>`, `v.<i>`).
        mask_value: what hides a key.
        per_layer: does the SLM read per-layer embeddings.
    """

    def __init__(
        self,
        slm: SlmAttention,
        embeddings: EmbeddingRows,
        empty: Mapping[str, np.ndarray],
        mask_value: float,
        *,
        per_layer: bool,
    ) -> None:
        self._slm = slm
        self._embeddings = embeddings
        self._empty = empty
        self._mask_value = mask_value
        self._per_layer = per_layer
        self.reset()

    def reset(self, position: int = 0) -> None:
        """Empty the rings; the next position is `position`, and earlier ones do not exist."""
        self.rings = {name: ring.copy() for name, ring in self._empty.items()}
        self.length = self._first = position

    def store_sink(self, rows: Mapping[str, np.ndarray]) -> None:
        """Begin with the stored rows [N, 1, d] of position 0; the next token given is then the one after."""
        for name, kept in rows.items():
            self.rings[name][:, :1] = kept
        self.length = 1

    def real(self, tokens: Ids, parents: Sequence[int], rows: int) -> dict[str, np.ndarray]:
        """Real inputs but the rings of a pass of R `rows` over a forest; parents stand before their children.

        Rows beyond the tokens are padding: each sees itself alone, since a softmax over nothing is none.
        """
        ids = np.full(rows, PADDING_TOKEN)
        ids[: len(tokens)] = tokens
        padded = [*map(int, parents), *[NO_PARENT] * (rows - len(tokens))]
        ancestors = ancestor_mask(padded)  # [R, R]
        positions = self.length + ancestors.sum(axis=1) - 1  # [R]
        real = {"embeds": self._embeddings.tokens(ids)}  # [R, H]
        if self._per_layer:
            real["per_layer"] = self._embeddings.per_layer(ids)
        for layer_type, capacity in self._slm.rings.items():
            span = self._slm.spans[layer_type]
            in_ring = visible(positions, held_positions(self._first, self.length, capacity), span)  # [R, W]
            in_ring[len(tokens) :] = False
            seen = np.concatenate([in_ring, ancestors & visible(positions, positions, span)], axis=1)
            real |= _attention_inputs(layer_type, positions, seen, self._slm.inv_freq[layer_type], self._mask_value)
        return real

    def commit(self, outputs: Mapping[str, np.ndarray], rows: Sequence[int] | np.ndarray) -> None:
        """Copy the new K/V of `rows` (a path, depth order) into the rings at the next positions."""
        for name, ring in self.rings.items():
            places = slots(self.length, len(rows), ring.shape[1])
            ring[:, places] = outputs[name.replace(".", "_new.")][:, rows]
        self.length += len(rows)


class SlmHost(SlmInputs):
    """Inputs and rings of one sequence in real numbers, with a network in place of a graph.

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
        empty = {
            f"{kind}.{layer.index}": np.zeros((layer.kv_heads, network.rings[layer.layer_type], layer.dim), np.float32)
            for layer in network.storing
            for kind in ("k", "v")
        }
        super().__init__(network, embeddings, empty, mask_value, per_layer=network.per_layer > 0)
        self._rows = rows
        self.reset(start)
        if sink is not None:
            self.store_sink(sink.rows)

    def feeds(self, tokens: Ids, parents: Sequence[int]) -> dict[str, np.ndarray]:
        """Real inputs of a pass over a forest on top of the rings."""
        return {**self.real(tokens, parents, self._rows), **self.rings}

    def append(self, run: Run, tokens: Ids) -> Real:
        """One pass over at most R consecutive tokens, all committed; its outputs."""
        outputs = run(self.feeds(tokens, range(NO_PARENT, len(tokens) - 1)))
        self.commit(outputs, range(len(tokens)))
        return outputs


def on_grid(recorded: Recorded, encodings: Mapping[str, Encoding]) -> dict[str, np.ndarray]:
    """The values after each tensor was quantised and dequantised by its encoding."""
    return {name: encodings[name].dequantize(encodings[name].quantize(values)) for name, values in recorded.items()}


def shared_positions(roots: np.ndarray, window: int) -> np.ndarray:
    """Positions [W + R - 1] that consecutive roots [R] see between them; EMPTY before the sequence."""
    width = window + len(roots) - 1
    positions = np.arange(roots[-1] - width, roots[-1])
    return np.where(positions < 0, EMPTY, positions)


def draft_feeds(
    network: HeadNetwork, recorded: Recorded, roots: np.ndarray, keys: np.ndarray, mask_value: float
) -> dict[str, np.ndarray]:
    """Real inputs for drafting at `roots` [R] (each >= 1) with K/V of positions `keys` [S] in this order."""
    spans = {kind: ring_span(span, network.window) for kind, span in network.architecture.spans.items()}
    feeds = {"e": recorded["e"][roots], "h": recorded["h"][roots - 1]}
    feeds |= root_inputs(roots, keys, spans, network.architecture.inv_freq, mask_value)
    exists = (keys != EMPTY)[:, None, None]
    for layer_type in LAYER_TYPES:
        for kind in ("k", "v"):
            rows = np.where(exists, recorded[f"{kind}.{layer_type}"][keys], np.float32(0.0))  # [S, N, d]
            feeds[f"{kind}.{layer_type}"] = np.ascontiguousarray(rows.transpose(1, 0, 2))
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
