"""What `convert-slm` measures its graphs by: transformers' model of the checkpoint, packed or unquantised.

A packed checkpoint's integers are the truth. An unquantised one is compared twice: as it is, transformers' model with
the static network in float (parity) and the graphs' best tokens with its own; and rounded, integer by integer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.slm_file import WEIGHTS_FILE, read_slm
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.recipe import SlmWeights
from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, HostTables
from hyco_export.stages.slm_proofs import require_parity

if TYPE_CHECKING:
    from hyco_export.core.network.slm_host import EmbeddingRows
    from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint, Rounding
    from hyco_export.nn.slm.static_pass import FloatSlm
    from hyco_export.nn.slm.truth import Truth

Tell = Callable[[int, int], None]


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


def rounding_of(weights: SlmWeights | None) -> "Rounding | None":
    """The recipe's wish as the checkpoint's reader takes it."""
    from hyco_export.nn.slm.float_checkpoint import Rounding

    if weights is None:
        return None
    ratios = np.linspace(weights.clip_ratio_high, weights.clip_ratio_low, weights.clip_ratio_count)
    return Rounding(weights.bits, weights.output_bits, ratios)


def packed_reference(
    folder: Path, slm: "FloatSlm", embeddings: "EmbeddingRows", kept: np.ndarray, trial: Trial, tell: Tell
) -> Reference:
    """Of a packed checkpoint. Raises GateError: no parity."""
    from hyco_export.nn.slm.gemma_quant import stock_model
    from hyco_export.nn.slm.surgery import OUTPUT_LAYER
    from hyco_export.nn.slm.truth import TrueLinears, Truth, true_tables

    stock = stock_model(folder)
    parity = require_parity(stock, slm, embeddings, kept, trial.ids, trial.rows, tell)
    return Reference(parity, Truth(TrueLinears(stock, {OUTPUT_LAYER: kept}), true_tables(stock)))


def float_reference(
    folder: Path,
    checkpoint: "FloatCheckpoint",
    network: SlmNetwork,
    kept: np.ndarray,
    out_dir: Path,
    trial: Trial,
    ratios: tuple[float, float],
    tell: Tell,
) -> Reference:
    """Of an unquantised checkpoint whose rounded weights and tables lie in `out_dir`. Raises GateError: no parity."""
    from hyco_export.evaluate.slm_quality import best_rows
    from hyco_export.nn.slm.float_checkpoint import float_stock
    from hyco_export.nn.slm.float_original import OriginalEmbeddings, original_slm
    from hyco_export.nn.slm.float_truth import NearestLinears, nearest_tables
    from hyco_export.nn.slm.surgery import MODEL_PREFIX, OUTPUT_LAYER, PER_LAYER_TABLE, TOKEN_TABLE
    from hyco_export.nn.slm.truth import Truth

    stock = float_stock(folder)
    original, embeddings = original_slm(checkpoint, network, kept), OriginalEmbeddings(checkpoint)
    parity = require_parity(stock, original, embeddings, kept, trial.ids, trial.rows, tell)
    best = best_rows(original, embeddings, trial.mask_value, trial.sequences, trial.rows, trial.max_passes)
    matrices = read_slm(out_dir / WEIGHTS_FILE)[1].matrices
    tables, names = HostTables(out_dir / TABLES_FILE), {TOKENS: TOKEN_TABLE, PER_LAYER: PER_LAYER_TABLE}
    scale_counts = {names[table]: tables.scales(table).shape[1] for table in tables.layouts}

    def written(module: str) -> IntegerMatrix:
        matrix = matrices[module.removeprefix(MODEL_PREFIX)]
        assert isinstance(matrix, IntegerMatrix)
        return matrix

    linears = NearestLinears(stock, {OUTPUT_LAYER: kept}, written, ratios)
    return Reference(parity, Truth(linears, nearest_tables(stock, scale_counts)), best)
