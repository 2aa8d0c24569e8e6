"""The two proofs of `convert-slm`: the static network is transformers' model, and no integer of a weight has changed.

Knows what is compared and the limits; models and files come in. Legend: V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hyco_export.core.network.slm_file import WEIGHTS_FILE, read_slm
from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, read_packed
from hyco_export.errors import GateError

if TYPE_CHECKING:
    from transformers import Gemma4ForCausalLM

    from hyco_export.core.network.slm_host import EmbeddingRows
    from hyco_export.nn.slm.static_pass import FloatSlm
    from hyco_export.nn.slm.truth import StoredPair

MAX_RELATIVE_DIFFERENCE = 1e-3  # of the logits' standard deviation: float32 sums in another order stay far below
REPORT_HINT = "do not use this artifact; report it with the checkpoint's config.json"


class Pair(NamedTuple):
    """One tensor as written and as the checkpoint has it."""

    name: str
    written: np.ndarray | None
    original: np.ndarray


def require_parity(
    stock: "Gemma4ForCausalLM",
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
    from hyco_export.nn.slm.parity import relative_difference, scenarios

    found: dict[str, float] = {}
    cases = scenarios(slm.network.rings, rows)
    for done, case in enumerate(cases, 1):
        found[case.name] = relative_difference(stock, slm, embeddings, kept, ids, rows, case)
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
        differing = int(np.count_nonzero(pair.written != pair.original))
        if differing:
            raise GateError(
                f"{pair.name} differs from the checkpoint in {differing} of {pair.original.size} values", REPORT_HINT
            )
        count += 1
    return count


def weight_pairs(
    stock: "Gemma4ForCausalLM", kept: np.ndarray, folder: Path, whole_graph: Path, part_graph: Path
) -> Iterator[Pair]:
    """Integers and scales of every linear and table, in each file that was written.

    Args:
        stock: transformers' model of the checkpoint.
        kept: token ids whose rows the output layer keeps.
        folder: with the host's tables and the float back end's weights.
        whole_graph, part_graph: ONNX files with all linears, and with some.
    """
    import onnx

    from hyco_export.graph.slm_graphs import stored_matrices
    from hyco_export.nn.slm.truth import true_tables

    linears = _kept_linears(stock, kept)
    whole, part = stored_matrices(onnx.load(whole_graph)), stored_matrices(onnx.load(part_graph))
    yield from _pairs(whole_graph.name, whole, linears)
    yield from _pairs(part_graph.name, part, {name: linears[name] for name in part})
    _, weights = read_slm(folder / WEIGHTS_FILE)
    again = {name: (matrix.integers, matrix.scales) for name, matrix in weights.integer_matrices().items()}
    yield from _pairs(WEIGHTS_FILE, again, linears)
    packed = {name: (table.packed, table.scales) for name, table in read_packed(folder / TABLES_FILE).items()}
    yield from _pairs(TABLES_FILE, packed, _named_tables(true_tables(stock)))


def _kept_linears(stock: "Gemma4ForCausalLM", kept: np.ndarray) -> dict[str, "StoredPair"]:
    """Linears by the network's names, the output layer cut to the rows of `kept`."""
    from hyco_export.nn.slm.surgery import MODEL_PREFIX, OUTPUT_LAYER
    from hyco_export.nn.slm.truth import StoredPair, true_linears

    linears = {name.removeprefix(MODEL_PREFIX): pair for name, pair in true_linears(stock).items()}
    output = linears[OUTPUT_LAYER]
    linears[OUTPUT_LAYER] = StoredPair(output.integers[kept], output.scales[kept])
    return linears


def _named_tables(tables: Mapping[str, "StoredPair"]) -> dict[str, "StoredPair"]:
    """Tables by the names the host uses."""
    from hyco_export.nn.slm.surgery import PER_LAYER_TABLE, TOKEN_TABLE

    names = {TOKEN_TABLE: TOKENS, PER_LAYER_TABLE: PER_LAYER}
    return {names[module]: pair for module, pair in tables.items()}


Written = Mapping[str, tuple[np.ndarray, np.ndarray]]


def _pairs(file: str, written: Written, originals: Mapping[str, "StoredPair"]) -> Iterator[Pair]:
    for name, original in originals.items():
        integers, scales = written.get(name, (None, None))
        yield Pair(f"{file}: integers of {name}", integers, original.integers)
        yield Pair(f"{file}: scales of {name}", scales, original.scales)
