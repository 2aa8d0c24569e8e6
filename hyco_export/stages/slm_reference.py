"""What `convert-slm` measures its graphs by: transformers' model of the checkpoint, packed or unquantised.

A packed checkpoint's integers are the truth. An unquantised one is compared twice: as it is, transformers' model with
the static network in float (parity) and the graphs' best tokens with its own; and rounded, integer by integer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.tables import PER_LAYER, TOKENS
from hyco_export.stages.slm_proofs import require_parity
from hyco_export.stages.slm_surgery import Surgery
from hyco_export.stages.stage import Progress

if TYPE_CHECKING:
    from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint
    from hyco_export.nn.slm.gemma_quant import PackedCheckpoint
    from hyco_export.nn.slm.truth import Truth


@dataclass(frozen=True)
class Reference:
    """Parity by scenario, what the weights must be, and the best tokens of a network before rounding (else None)."""

    parity: dict[str, float]
    truth: "Truth"
    original_best: np.ndarray | None = None


@dataclass(frozen=True)
class Trial:
    """Text and passes of the comparisons."""

    sequences: Sequence[Sequence[int]]
    rows: int
    mask_value: float
    max_passes: int

    @property
    def ids(self) -> list[int]:
        """The sequences one after the other."""
        return [token for ids in self.sequences for token in ids]


def refer(
    folder: Path, checkpoint: "PackedCheckpoint | FloatCheckpoint", surgery: Surgery, trial: Trial, progress: Progress
) -> Reference:
    """Parity with transformers' model, and what it says of the weights.

    Raises:
        GateError: the static network is not transformers' model.
    """
    from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint

    if isinstance(checkpoint, FloatCheckpoint):
        return _float_reference(folder, checkpoint, surgery, trial, progress)
    return _packed_reference(folder, surgery, trial, progress)


def _packed_reference(folder: Path, surgery: Surgery, trial: Trial, progress: Progress) -> Reference:
    from hyco_export.nn.slm.gemma_quant import stock_model
    from hyco_export.nn.slm.surgery import OUTPUT_LAYER
    from hyco_export.nn.slm.truth import TrueLinears, Truth, true_tables

    stock = stock_model(folder)
    parity = require_parity(
        stock, surgery.float_slm, surgery.tables, surgery.kept, trial.ids, trial.rows, _teller(progress)
    )
    return Reference(parity, Truth(TrueLinears(stock, {OUTPUT_LAYER: surgery.kept}), true_tables(stock)))


def _float_reference(
    folder: Path, checkpoint: "FloatCheckpoint", surgery: Surgery, trial: Trial, progress: Progress
) -> Reference:
    from hyco_export.evaluate.slm_quality import best_rows
    from hyco_export.nn.slm.float_checkpoint import float_stock
    from hyco_export.nn.slm.float_original import OriginalEmbeddings, original_slm
    from hyco_export.nn.slm.float_truth import NearestLinears, nearest_tables
    from hyco_export.nn.slm.opening import find_opening
    from hyco_export.nn.slm.surgery import MODEL_PREFIX, OUTPUT_LAYER, PER_LAYER_TABLE, TOKEN_TABLE
    from hyco_export.nn.slm.truth import Truth

    stock, kept = float_stock(folder), surgery.kept
    original, embeddings = original_slm(checkpoint, surgery.network, kept), OriginalEmbeddings(checkpoint)
    parity = require_parity(stock, original, embeddings, kept, trial.ids, trial.rows, _teller(progress))
    opening = None
    if surgery.opening is not None:
        opening = find_opening(original, embeddings, surgery.opening.token, trial.rows, trial.mask_value)
    best = best_rows(original, embeddings, trial.mask_value, trial.sequences, trial.rows, trial.max_passes, opening)

    def written(module: str) -> IntegerMatrix:
        matrix = surgery.weights.matrices[module.removeprefix(MODEL_PREFIX)]
        assert isinstance(matrix, IntegerMatrix)
        return matrix

    names = {TOKENS: TOKEN_TABLE, PER_LAYER: PER_LAYER_TABLE}
    scale_counts = {names[table]: surgery.tables.scales(table).shape[1] for table in surgery.tables.layouts}
    linears = NearestLinears(stock, {OUTPUT_LAYER: kept}, written, checkpoint.clip_ratios)
    return Reference(parity, Truth(linears, nearest_tables(stock, scale_counts)), best)


def _teller(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.step("parity with transformers", done, total)
