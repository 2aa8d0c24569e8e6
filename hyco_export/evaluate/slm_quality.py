"""How far the SLM's integer graph is from its float network on held-out text: by layer, and in what it would draft.

Both run over the same sequences pass by pass. SQNR compares them on the same integer inputs; top-1 agreement lets each
go on with its own K/V. The cost of one layer's grids is the KL from float logits to those with that layer rounded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from hyco_export.core.device_spec import GraphSession, GraphSpec, TensorSpec, to_integers, to_real
from hyco_export.core.encodings import Encoding
from hyco_export.core.network.blocks import only_feeds_tanh
from hyco_export.core.network.host import AttentionSink, EmbeddingRows, SlmHost
from hyco_export.core.numerics import decibels, logit_kl, top1_agreement
from hyco_export.core.ring import NO_PARENT
from hyco_export.models.slm.calibration import full_passes
from hyco_export.models.slm.static_pass import FloatSlm

NEW_ROWS = ("k_new", "v_new")  # what a layer writes into its ring, in 8 bits


class SlmQuality(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures over `positions` tokens; by tensor, `layers` is the SQNR in dB, `clipped` the share outside its range.

    `original_agreement`: with the network before its weights were rounded, where that is known.
    """

    positions: int
    top1_agreement: float
    layers: dict[str, float]
    clipped: dict[str, float]
    original_agreement: float | None = None

    @property
    def median_db(self) -> float:
        return float(np.median(list(self.layers.values())))

    @property
    def worst_db(self) -> float:
        return min(self.layers.values())


@dataclass
class _Tally:
    """Running sums of one comparison."""

    signal: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    agreeing: int = 0
    agreeing_original: int | None = None
    positions: int = 0

    def compare(self, name: str, wanted: np.ndarray, found: np.ndarray) -> None:
        exact = wanted.astype(np.float64)
        self.signal[name] = self.signal.get(name, 0.0) + float(np.sum(exact**2))
        self.noise[name] = self.noise.get(name, 0.0) + float(np.sum((exact - found) ** 2))

    def count_outside(self, name: str, values: np.ndarray, low: float, high: float) -> None:
        outside = int(np.count_nonzero((values < low) | (values > high)))
        self.outside[name] = self.outside.get(name, 0) + outside
        self.values[name] = self.values.get(name, 0) + values.size

    def result(self) -> SlmQuality:
        return SlmQuality(
            positions=self.positions,
            top1_agreement=self.agreeing / self.positions,
            layers={name: decibels(self.signal[name], self.noise[name]) for name in self.signal},
            clipped={name: count / self.values[name] for name, count in self.outside.items() if count},
            original_agreement=None if self.agreeing_original is None else self.agreeing_original / self.positions,
        )


def measure_slm(
    slm: FloatSlm,
    session: GraphSession,
    graph: GraphSpec,
    inner: Sequence[TensorSpec],
    encodings: Mapping[str, Encoding],
    embeddings: EmbeddingRows,
    mask_value: float,
    sequences: Sequence[Sequence[int]],
    max_passes: int,
    original_best: np.ndarray | None = None,
    sink: AttentionSink | None = None,
) -> SlmQuality:
    """Compare on the first `max_passes` full passes of the sequences.

    Args:
        session: the tree graph, also giving out the `inner` tensors.
        graph: its declared inputs and outputs.
        inner: tensors to judge beside the outputs, under their names in the float network.
        original_best: what `best_rows` gave for the network before rounding, over the same passes.
        sink: of every sequence, which then begin after it.

    Raises:
        ValueError: no sequence fills a pass.
    """
    rows = graph.input("embeds").shape[0]
    tally = _Tally(agreeing_original=None if original_best is None else 0)
    outputs = (*graph.outputs, *inner)
    for first, tokens in islice(_passes(sequences, rows), max_passes):
        if first:
            own = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
            graph_side = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        chain = range(NO_PARENT, rows - 1)
        feeds = to_integers(graph.inputs, graph_side.feeds(tokens, chain))
        found = to_real(outputs, session.run(feeds))
        wanted = _float_tensors(slm, to_real(graph.inputs, feeds), tally, encodings)
        for spec in outputs:
            tally.compare(spec.name, wanted[spec.name], found[spec.name])
        graph_side.commit(found, range(rows))
        float_logits = own.append(slm.tree, tokens)["logits"]
        best = found["logits"].argmax(1)
        tally.agreeing += int(np.sum(float_logits.argmax(1) == best))
        if original_best is not None and tally.agreeing_original is not None:
            tally.agreeing_original += int(np.sum(original_best[tally.positions : tally.positions + rows] == best))
        tally.positions += rows
    if not tally.positions:
        raise ValueError(f"no sequence has {rows} tokens")
    return tally.result()


def best_rows(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    mask_value: float,
    sequences: Sequence[Sequence[int]],
    rows: int,
    max_passes: int,
    sink: AttentionSink | None = None,
) -> np.ndarray:
    """Kept row of the best token at each position [n] of the first `max_passes` full passes, with its own K/V."""
    found = []
    for first, tokens in islice(_passes(sequences, rows), max_passes):
        if first:
            host = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        found.append(host.append(slm.tree, tokens)["logits"].argmax(1))
    return np.concatenate(found)


def _passes(sequences: Sequence[Sequence[int]], rows: int) -> Iterator[tuple[bool, Sequence[int]]]:
    """Full passes with a mark where a sequence begins."""
    for ids in sequences:
        for number, tokens in enumerate(full_passes(ids, rows)):
            yield number == 0, tokens


def _float_tensors(
    slm: FloatSlm, feeds: Mapping[str, np.ndarray], tally: _Tally, encodings: Mapping[str, Encoding]
) -> dict[str, np.ndarray]:
    """Every observed tensor and output of a float pass; counts what lies outside its grid."""
    seen: dict[str, np.ndarray] = {}

    def observe(name: str, values: torch.Tensor) -> None:
        seen[name] = values.numpy()
        if not only_feeds_tanh(name):
            tally.count_outside(name, seen[name], *ends(encodings[name]))

    outputs = slm.tree(feeds, observe)
    return {**seen, **outputs}


def ends(encoding: Encoding) -> tuple[float, float]:
    """Real values half a step beyond a grid's ends: outside them a value is clipped."""
    info = np.iinfo(encoding.dtype)
    low = (info.min - 0.5 - encoding.zero_point) * encoding.scale
    high = (info.max + 0.5 - encoding.zero_point) * encoding.scale
    return low, high


def grids_by_row(results: Sequence[str], encodings: Mapping[str, Encoding]) -> dict[str, dict[str, Encoding]]:
    """For each row of the table, the grids that are its own.

    A new K or V is a row of its own; the result of a layer stands for all other tensors of that layer; any other
    result stands for itself.
    """
    rows = {}
    for name in results:
        layer = name.rpartition(".")[0]
        if name.partition(".")[0] in NEW_ROWS or not layer:
            rows[name] = {name: encodings[name]}
        else:
            rows[name] = {tensor: grid for tensor, grid in encodings.items() if tensor.startswith(f"{layer}.")}
    return rows


class RowCost(NamedTuple):
    """Of rounding some tensors alone: mean KL in nats per token, and the share of tokens whose best one stays."""

    kl: float
    top1: float


def row_costs(
    slm: FloatSlm,
    rows: Mapping[str, Mapping[str, Encoding]],
    embeddings: EmbeddingRows,
    rows_per_pass: int,
    mask_value: float,
    sequences: Sequence[Sequence[int]],
    max_passes: int,
    tell: Callable[[int, int], None],
    sink: AttentionSink | None = None,
) -> dict[str, RowCost]:
    """What each row's rounding costs, over the first full passes of the sequences (after `sink`, if they have one).

    Raises:
        ValueError: no sequence fills a pass.
    """
    found: dict[str, list[RowCost]] = {name: [] for name in rows}
    passes = [(number, tokens) for ids in sequences for number, tokens in enumerate(full_passes(ids, rows_per_pass))]
    if not passes:
        raise ValueError(f"no sequence has {rows_per_pass} tokens")
    total = min(max_passes, len(passes))

    def compare(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = slm.tree(feeds)
        exact = outputs["logits"]
        for name, grids in rows.items():
            logits = slm.rounded_tree(feeds, grids)["logits"]
            found[name].append(RowCost(logit_kl(exact, logits), top1_agreement(exact, logits)))
        return outputs

    for done, (number, tokens) in enumerate(islice(passes, max_passes), 1):
        if number == 0:
            host = SlmHost(slm.network, embeddings, rows_per_pass, mask_value, sink=sink)
        host.append(compare, tokens)
        tell(done, total)
    return {name: RowCost(*np.mean(costs, axis=0).tolist()) for name, costs in found.items()}
