"""The part of `qat-head` that says which layers deserve 8 bits, and what they would win; measured before training.

Files:
    sensitivity.csv, sensitivity.svg   by linear layer: width, bytes, SQNR of the weight, both KL figures
                                       (`models.head.sensitivity`), on the first calibration sequences
    suggestion.json                    combinations of the best layers at 8 bits, each measured as a whole on the
                                       validation sequences, and which of them is suggested as `$.qat.overrides`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.files import write_json
from hyco_export.core.network.quantisation import kv_range_names, rewidened
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.numerics import BYTES_PER_MB
from hyco_export.core.recipe import SlmGraph
from hyco_export.evaluate.cost_table import Panel, write_csv, write_picture
from hyco_export.evaluate.slm_quality import RowCost, SlmQuality, grids_by_row, row_costs
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.agreement import compare_heads
from hyco_export.models.head.quantisers import load_matrices
from hyco_export.models.head.sensitivity import LayerCost, by_gain_per_byte, layer_costs, prefix_sizes
from hyco_export.models.head.stored import stored_name
from hyco_export.models.head.unroll import RootRows
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.parts.slm_surgery import Surgery

SENSITIVITY_CSV, SENSITIVITY_SVG, SUGGESTION_FILE = "sensitivity.csv", "sensitivity.svg", "suggestion.json"
WIDE_BITS = 8
WIDTHS = {False: 8, True: 16}  # of rings, by `SlmGraph.wide_kv`
STREAM_SPLIT, STREAM_WHOLE = "stream.split", "stream.whole"  # rows: all tensors of the residual stream together
WORTHWHILE_SHARE = 0.5  # of what 8 bits everywhere would win: the smallest combination that wins it is suggested


class Combination(msgspec.Struct, frozen=True):
    """Layers at 8 bits together. Gains are over none of them, means over the depths; `kl_gain` in nats per token."""

    layers: tuple[str, ...]
    extra_mb: float
    top1_gain: float
    kl_gain: float

    @property
    def sentence(self) -> str:
        subject, verb = ("1 tensor", "wins") if len(self.layers) == 1 else (f"{len(self.layers)} tensors", "win")
        gain = f"{self.top1_gain:.2%} agreement for {self.extra_mb:.3g} MB (before training)"
        return f"{subject} at {WIDE_BITS} bits {verb} {gain}"


class Suggestion(msgspec.Struct, frozen=True):
    """`overrides` is what `$.qat.overrides` takes."""

    sentence: str
    overrides: dict[str, int]
    combinations: tuple[Combination, ...]


@dataclass(frozen=True)
class Heads:
    """What is compared: the original head, a float one to put weights into, its weights as they are and in 8 bits."""

    teacher: HeadModel
    student: HeadModel
    narrow: Mapping[str, IntegerMatrix]
    wide: Mapping[str, IntegerMatrix]


def write_evidence(
    heads: Heads,
    learned: Sequence[RootRows],
    held_out: Sequence[RootRows],
    steps: int,
    out_dir: Path,
    progress: Progress,
) -> Metrics:
    """Rank layers on `learned`, try combinations on `held_out`, write the files; the suggestion for the manifest."""

    def report(done: int, total: int) -> None:
        progress.step("passes that measure single layers", done, total)

    costs = layer_costs(heads.teacher, heads.student, heads.narrow, heads.wide, learned, steps, report)
    _write_costs(costs, out_dir)
    combinations = _combinations(heads, by_gain_per_byte(costs), held_out, steps, progress)
    suggestion = _suggest(combinations)
    write_json(out_dir / SUGGESTION_FILE, suggestion)
    return {"suggestion": suggestion.sentence, "suggested_overrides": suggestion.overrides}


def _write_costs(costs: Sequence[LayerCost], out_dir: Path) -> None:

    names = [stored_name(cost.name) for cost in costs]
    rows = [
        {
            "tensor": name,
            "bits": cost.bits,
            "bytes": cost.stored_bytes,
            "extra_bytes_at_8": cost.extra_bytes,
            "sqnr_db": cost.sqnr_db,
            "kl_alone_nats": cost.kl_alone,
            "kl_gain_at_8_nats": cost.kl_gain,
        }
        for name, cost in zip(names, costs, strict=True)
    ]
    write_csv(out_dir / SENSITIVITY_CSV, rows)
    panels = (
        Panel("SQNR of the weight, dB", [cost.sqnr_db for cost in costs]),
        Panel("KL when only this is quantised, millinats", [1000 * cost.kl_alone for cost in costs]),
        Panel("KL won when only this has 8 bits, millinats", [1000 * cost.kl_gain for cost in costs]),
    )
    write_picture(out_dir / SENSITIVITY_SVG, "The head's linear layers after the clip search", names, panels)


def _combinations(
    heads: Heads, ranked: Sequence[LayerCost], sequences: Sequence[RootRows], steps: int, progress: Progress
) -> list[Combination]:
    """The first 1, 2, 4, ... layers at 8 bits, measured together."""
    found = []
    sizes = [0, *prefix_sizes(len(ranked))]
    for done, size in enumerate(sizes, 1):
        chosen = [cost.name for cost in ranked[:size]]
        load_matrices(heads.student, {**heads.narrow, **{name: heads.wide[name] for name in chosen}})
        depths = compare_heads(heads.teacher, heads.student, sequences, steps)
        top1, kl = (sum(values) / len(depths) for values in zip(*((d.top1, d.kl) for d in depths), strict=True))
        extra_mb = sum(cost.extra_bytes for cost in ranked[:size]) / BYTES_PER_MB
        found.append((tuple(map(stored_name, chosen)), extra_mb, top1, kl))
        progress.step("combinations at 8 bits measured", done, len(sizes))
    (_, _, base_top1, base_kl), *tried = found
    return [
        Combination(layers, round(extra_mb, 6), round(top1 - base_top1, 5), round(base_kl - kl, 6))
        for layers, extra_mb, top1, kl in tried
    ]


def _suggest(combinations: Sequence[Combination]) -> Suggestion:
    """The smallest combination that wins WORTHWHILE_SHARE of the best one's KL, if there is any."""
    if not combinations:
        return Suggestion("no tensor gains from 8 bits", {}, ())
    enough = WORTHWHILE_SHARE * max(combination.kl_gain for combination in combinations)
    chosen = next(combination for combination in combinations if combination.kl_gain >= enough)
    return Suggestion(chosen.sentence, dict.fromkeys(chosen.layers, WIDE_BITS), tuple(combinations))


# The part of `convert-slm` that says which layers the rounding of their activations costs most.


@dataclass(frozen=True)
class QuantisedSlm:
    """The float SLM with its tables, and the encodings of its integer graph; `margin`: theirs around what was seen."""

    surgery: Surgery
    encodings: Mapping[str, Encoding]
    mask_value: float
    margin: float


def write_slm_evidence(
    quantised: QuantisedSlm,
    quality: SlmQuality,
    graph: SlmGraph,
    sequences: Sequence[Sequence[int]],
    out_dir: Path,
    progress: Progress,
) -> None:
    """One row for each tensor that `quality` judges; further rows for what a recipe may choose.

    These are each ring in the width that it does not have, all rings in either width, and of a residual stream with
    split channels the stream as it is and as it would be whole.
    """

    def measure(slm: FloatSlm, grids: Mapping[str, Mapping[str, Encoding]], label: str) -> dict[str, RowCost]:
        return row_costs(
            slm,
            grids,
            quantised.surgery.tables,
            graph.rows,
            quantised.mask_value,
            sequences,
            graph.evidence_passes,
            lambda done, total: progress.step(label, done, total),
            quantised.surgery.sink,
        )

    unsplit = quantised.surgery.unsplit
    rings = _ring_choices(quantised)
    grids = grids_by_row(list(quality.layers), quantised.encodings) | rings
    if unsplit is not None:
        grids[STREAM_SPLIT] = {name: quantised.encodings[name] for name in unsplit.peaks if name != "embeds"}
    costs = measure(quantised.surgery.float_slm, grids, "passes that measure single layers")
    if unsplit is not None:
        whole = {STREAM_WHOLE: unsplit.grids(quantised.margin)}
        costs |= measure(unsplit.float_slm, whole, "passes that measure the stream before it was split")
    rows = [
        {
            "tensor": name,
            "sqnr_db": quality.layers.get(name),
            "kl_alone_nats": cost.kl,
            "top1_alone": cost.top1,
            "ring_bytes": _ring_bytes(quantised.surgery.network, grids.get(name, {})),
        }
        for name, cost in costs.items()
    ]
    write_csv(out_dir / SENSITIVITY_CSV, rows)
    names = list(costs)
    panels = (
        Panel("SQNR of the integer graph up to here, dB", [quality.layers.get(name) for name in names]),
        Panel("KL when only this layer is rounded, micronats", [1e6 * costs[name].kl for name in names]),
    )
    write_picture(out_dir / SENSITIVITY_SVG, "The SLM's activations", names, panels)


def _ring_choices(quantised: QuantisedSlm) -> dict[str, dict[str, Encoding]]:
    """K/V in both widths, all rings together; and each ring in the width that it does not have, by its row."""
    widths: dict[bool, dict[str, Encoding]] = {False: {}, True: {}}
    others = {}
    for name in kv_range_names(quantised.surgery.network):
        own = quantised.encodings[name]
        for wide, found in widths.items():
            found[name] = rewidened(own, wide)
            if found[name].dtype != own.dtype:
                others[f"{name}, {WIDTHS[wide]} bits"] = {name: found[name]}
    return {**others, **{f"k_new and v_new, {WIDTHS[wide]} bits": found for wide, found in widths.items()}}


def _ring_bytes(network: SlmNetwork, grids: Mapping[str, Encoding]) -> int | None:
    """Memory of the rings among the tensors of a row; None where there are none."""
    sizes = {
        f"{kind}_new.{layer.index}": layer.kv_heads * layer.dim * network.rings[layer.layer_type]
        for layer in network.storing
        for kind in ("k", "v")
    }
    if not grids.keys() <= sizes.keys() or not grids:
        return None
    return sum(sizes[name] * np.dtype(grid.dtype).itemsize for name, grid in grids.items())
