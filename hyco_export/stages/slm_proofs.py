"""The two proofs of `convert-slm`: the static network is transformers' model, and no integer of a weight has changed.

Knows what is compared and the limits; models and files come in. Legend: V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hyco_export.core.network.slm_file import WEIGHTS_FILE, read_slm
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, HostTables
from hyco_export.errors import GateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hyco_export.core.network.slm_host import EmbeddingRows
    from hyco_export.nn.slm.static_pass import FloatSlm
    from hyco_export.nn.slm.truth import StoredPair, Truth

MAX_RELATIVE_DIFFERENCE = 1e-3  # of the logits' standard deviation: float32 sums in another order stay far below
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
    stock: "PreTrainedModel",
    slm: "FloatSlm",
    embeddings: "EmbeddingRows",
    kept: np.ndarray,
    ids: Sequence[int],
    rows: int,
    tell: Callable[[int, int], None],
) -> dict[str, float]:
    """Largest logit difference by scenario, in standard deviations of transformers' logits.

    Raises:
        GateError: one reaches MAX_RELATIVE_DIFFERENCE.
    """
    from hyco_export.nn.slm.parity import comparison, relative_difference

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
        tell(done, len(cases))
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


def weight_pairs(truth: "Truth", folder: Path, whole_graph: Path, part_graph: Path) -> Iterator[Pair]:
    """Integers and scales of every linear and table, in each file that was written; one linear at a time in memory.

    Args:
        truth: what they must be.
        folder: with the host's tables, the float back end's weights and the graphs' external data.
        whole_graph, part_graph: ONNX files with all linears, and with some.
    """
    import onnx

    from hyco_export.graph.slm_graphs import StoredMatrices
    from hyco_export.nn.slm.surgery import MODEL_PREFIX, PER_LAYER_TABLE, TOKEN_TABLE

    whole, part = (
        StoredMatrices(onnx.load(path, load_external_data=False), folder) for path in (whole_graph, part_graph)
    )
    matrices = read_slm(folder / WEIGHTS_FILE)[1].matrices
    for module in truth.linears:
        name, original = module.removeprefix(MODEL_PREFIX), truth.linears[module]
        yield from _pairs(whole_graph.name, name, whole.get(name), original)
        if name in part:
            yield from _pairs(part_graph.name, name, part[name], original)
        yield from _pairs(WEIGHTS_FILE, name, _stored(matrices.get(name)), original)
    tables, names = HostTables(folder / TABLES_FILE), {TOKEN_TABLE: TOKENS, PER_LAYER_TABLE: PER_LAYER}
    for module, original in truth.tables.items():
        table = names[module]
        yield from _pairs(TABLES_FILE, table, (tables.stored(table), tables.scales(table)), original)


def _pairs(file: str, name: str, written: tuple[Rows, np.ndarray] | None, original: "StoredPair") -> Iterator[Pair]:
    integers, scales = written or (None, None)
    yield Pair(f"{file}: integers of {name}", integers, original.integers)
    yield Pair(f"{file}: scales of {name}", scales, original.scales)


def _stored(matrix: IntegerMatrix | np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    return (matrix.integers, matrix.scales) if isinstance(matrix, IntegerMatrix) else None
