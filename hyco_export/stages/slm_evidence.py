"""The part of `convert-slm` that says which layers its activations' grids cost most.

Files:
    sensitivity.csv, sensitivity.svg   by result of a layer and by new K/V: SQNR of the integer graph up to there
                                       (sqnr.json), and the KL of rounding this layer alone (`evaluate.slm_layers`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.encodings import Encoding
from hyco_export.core.recipe import SlmGraph
from hyco_export.stages.slm_surgery import Surgery
from hyco_export.stages.stage import Progress

if TYPE_CHECKING:
    from hyco_export.evaluate.slm_quality import SlmQuality

SENSITIVITY_CSV, SENSITIVITY_SVG = "sensitivity.csv", "sensitivity.svg"


@dataclass(frozen=True)
class Subject:
    """The float SLM with its tables, and the grids of its integer graph."""

    surgery: Surgery
    encodings: Mapping[str, Encoding]
    mask_value: float


def write_slm_evidence(
    subject: Subject,
    quality: "SlmQuality",
    graph: SlmGraph,
    sequences: Sequence[Sequence[int]],
    out_dir: Path,
    progress: Progress,
) -> None:
    """One row for each tensor that `quality` judges."""
    from hyco_export.evaluate.cost_table import Panel, write_csv, write_picture
    from hyco_export.evaluate.slm_layers import grids_by_row, row_divergences

    names = list(quality.layers)
    divergences = row_divergences(
        subject.surgery.float_slm,
        grids_by_row(names, subject.encodings),
        subject.surgery.tables,
        graph.rows,
        subject.mask_value,
        sequences,
        graph.evidence_passes,
        lambda done, total: progress.step("passes that measure single layers", done, total),
        subject.surgery.opening,
    )
    rows = [{"tensor": name, "sqnr_db": quality.layers[name], "kl_alone_nats": divergences[name]} for name in names]
    write_csv(out_dir / SENSITIVITY_CSV, rows)
    panels = (
        Panel("SQNR of the integer graph up to here, dB", list(quality.layers.values())),
        Panel("KL when only this layer is rounded, micronats", [1e6 * divergences[name] for name in names]),
    )
    write_picture(out_dir / SENSITIVITY_SVG, "The SLM's activations", names, panels)
