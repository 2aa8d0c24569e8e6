"""The two proofs of `convert-slm`: the static network is transformers' model, and no integer of a weight has changed.

Legend: V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
from transformers import PreTrainedModel

from hyco_export.core.network.host import EmbeddingRows
from hyco_export.core.network.slm import GATE
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, HostTables
from hyco_export.errors import GateError
from hyco_export.evaluate.slm_quality import best_rows
from hyco_export.graph.slm_graphs import StoredMatrices
from hyco_export.models.slm.float import FloatCheckpoint, OriginalEmbeddings, float_stock, original_slm
from hyco_export.models.slm.packed import PackedCheckpoint, stock_model
from hyco_export.models.slm.parity import comparison, relative_difference
from hyco_export.models.slm.reference_weights import (
    NearestLinears,
    ReferenceWeights,
    StoredPair,
    TrueLinears,
    nearest_tables,
    true_tables,
)
from hyco_export.models.slm.static_pass import FloatSlm, find_attention_sink
from hyco_export.models.slm.surgery import MODEL_PREFIX, OUTPUT_LAYER, PER_LAYER_TABLE, TOKEN_TABLE
from hyco_export.stages.declarations import Progress
from hyco_export.stages.parts.slm_surgery import MAX_RELATIVE_DIFFERENCE, Surgery

COMPARED_ROWS = 8192
REPORT_HINT = "do not use this artifact; report it with the checkpoint's config.json"


class Rows(Protocol):
    """An array, or one that is read from its file row by row."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Any, /) -> np.ndarray: ...


class Pair(NamedTuple):
    """One tensor as written and as the checkpoint has it."""

    name: str
    written: Rows | None
    original: np.ndarray


def require_parity(
    stock: PreTrainedModel,
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    kept: np.ndarray,
    ids: Sequence[int],
    rows: int,
    on_case: Callable[[int, int], None],
) -> dict[str, float]:
    """Largest logit difference by scenario, in standard deviations of transformers' logits.

    Raises:
        GateError: one reaches MAX_RELATIVE_DIFFERENCE.
    """
    found: dict[str, float] = {}
    short, window, cases = comparison(stock, slm, rows)
    for done, case in enumerate(cases, 1):
        found[case.name] = relative_difference(stock, short, embeddings, kept, ids, rows, case, window)
        if not found[case.name] < MAX_RELATIVE_DIFFERENCE:
            raise GateError(
                f"float parity of the SLM, {case.name}: logits differ by {found[case.name]:.1e} standard deviations, "
                f"the limit is {MAX_RELATIVE_DIFFERENCE:.0e}",
                REPORT_HINT,
            )
        on_case(done, len(cases))
    return found


def require_equal(pairs: Iterator[Pair]) -> int:
    """How many tensors were compared, all equal.

    Raises:
        GateError: the first that is missing or differs.
    """
    count = 0
    for pair in pairs:
        if pair.written is None:
            raise GateError(f"{pair.name} was not written", REPORT_HINT)
        if pair.written.shape != pair.original.shape:
            shapes = f"{list(pair.written.shape)} instead of {list(pair.original.shape)}"
            raise GateError(f"{pair.name} has shape {shapes}", REPORT_HINT)
        differing = _differing(pair.written, pair.original)
        if differing:
            raise GateError(
                f"{pair.name} differs from the checkpoint in {differing} of {pair.original.size} values", REPORT_HINT
            )
        count += 1
    return count


def _differing(written: Rows, original: np.ndarray) -> int:
    """How many values differ; a table of a gigabyte is read in blocks."""
    if not original.ndim:
        return int(np.count_nonzero(written[...] != original))
    blocks = (slice(start, start + COMPARED_ROWS) for start in range(0, len(original), COMPARED_ROWS))
    return sum(int(np.count_nonzero(written[block] != original[block])) for block in blocks)


def weight_pairs(weights: ReferenceWeights, folder: Path, whole_graph: Path, part_graph: Path) -> Iterator[Pair]:
    """Integers and scales of every linear and table, in each file that was written; one linear at a time in memory.

    Args:
        weights: what they must be.
        folder: with the host's tables, the float back end's weights and the graphs' external data.
        whole_graph, part_graph: ONNX files with all linears, and with some.
    """
    whole, part = (
        StoredMatrices(onnx.load(path, load_external_data=False), folder) for path in (whole_graph, part_graph)
    )
    network, stored = read_slm(folder / WEIGHTS_FILE)
    for module in weights.linears:
        name, original = module.removeprefix(MODEL_PREFIX), weights.linears[module]
        if network.copies and name.endswith(GATE):
            original = original._replace(integers=original.integers[:, list(network.sum_columns)])
        yield from _pairs(whole_graph.name, name, whole.get(name), original)
        if name in part:
            yield from _pairs(part_graph.name, name, part[name], original)
        yield from _pairs(WEIGHTS_FILE, name, _stored(stored.matrices.get(name)), original)
    tables, names = HostTables(folder / TABLES_FILE), {TOKEN_TABLE: TOKENS, PER_LAYER_TABLE: PER_LAYER}
    for module, original in weights.tables.items():
        table = names[module]
        yield from _pairs(TABLES_FILE, table, (tables.stored(table), tables.scales(table)), original)


def _pairs(file: str, name: str, written: tuple[Rows, np.ndarray] | None, original: StoredPair) -> Iterator[Pair]:
    integers, scales = written or (None, None)
    yield Pair(f"{file}: integers of {name}", integers, original.integers)
    yield Pair(f"{file}: scales of {name}", scales, original.scales)


def _stored(matrix: IntegerMatrix | np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    return (matrix.integers, matrix.scales) if isinstance(matrix, IntegerMatrix) else None


# What `convert-slm` measures its graphs by: transformers' model of the checkpoint, packed or unquantised.


@dataclass(frozen=True)
class Reference:
    """Parity by scenario, what the weights must be, and the best tokens of a network before rounding (else None)."""

    parity: dict[str, float]
    weights: ReferenceWeights
    original_best: np.ndarray | None = None


@dataclass(frozen=True)
class ComparedText:
    """Text and passes of the comparisons."""

    sequences: Sequence[Sequence[int]]
    rows: int
    mask_value: float
    max_passes: int

    @property
    def ids(self) -> list[int]:
        """The sequences one after the other."""
        return [token for ids in self.sequences for token in ids]


def find_reference(
    folder: Path,
    checkpoint: PackedCheckpoint | FloatCheckpoint,
    surgery: Surgery,
    compared: ComparedText,
    progress: Progress,
) -> Reference:
    """Parity with transformers' model, and what it says of the weights.

    Raises:
        GateError: the static network is not transformers' model.
    """
    if isinstance(checkpoint, FloatCheckpoint):
        return _float_reference(folder, checkpoint, surgery, compared, progress)
    return _packed_reference(folder, surgery, compared, progress)


def _packed_reference(folder: Path, surgery: Surgery, compared: ComparedText, progress: Progress) -> Reference:

    stock = stock_model(folder)
    parity = require_parity(
        stock, surgery.float_slm, surgery.tables, surgery.kept, compared.ids, compared.rows, _on_case(progress)
    )
    return Reference(parity, ReferenceWeights(TrueLinears(stock, {OUTPUT_LAYER: surgery.kept}), true_tables(stock)))


def _float_reference(
    folder: Path, checkpoint: FloatCheckpoint, surgery: Surgery, compared: ComparedText, progress: Progress
) -> Reference:

    stock, kept = float_stock(folder), surgery.kept
    original, embeddings = original_slm(checkpoint, surgery.network, kept), OriginalEmbeddings(checkpoint)
    parity = require_parity(stock, original, embeddings, kept, compared.ids, compared.rows, _on_case(progress))
    sink = None
    if surgery.sink is not None:
        sink = find_attention_sink(original, embeddings, surgery.sink.token, compared.rows, compared.mask_value)
    best = best_rows(
        original, embeddings, compared.mask_value, compared.sequences, compared.rows, compared.max_passes, sink
    )

    def written(module: str) -> IntegerMatrix:
        matrix = surgery.weights.matrices[module.removeprefix(MODEL_PREFIX)]
        assert isinstance(matrix, IntegerMatrix)
        return matrix

    names = {TOKENS: TOKEN_TABLE, PER_LAYER: PER_LAYER_TABLE}
    scale_counts = {names[table]: surgery.tables.scales(table).shape[1] for table in surgery.tables.layouts}
    linears = NearestLinears(stock, {OUTPUT_LAYER: kept}, written, checkpoint.clip_ratios)
    return Reference(parity, ReferenceWeights(linears, nearest_tables(stock, scale_counts)), best)


def _on_case(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.step("parity with transformers", done, total)
