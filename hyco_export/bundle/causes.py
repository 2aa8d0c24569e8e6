"""Why a device's outputs are not the golden ones: faults with a name, each tried on the data.

Two kinds. Faults of reading an output (wrong scale or zero point, a buffer nobody wrote, another layout or byte order,
answers in another order) are looked for in the numbers themselves. Faults of filling the inputs (rings, masks, rotary
tables, encodings) are planted in the golden inputs, and the integer graph is run on them: the one that gives what the
device gave is the cause.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyco_export.bundle.faults import faults
from hyco_export.bundle.spec import Bundle, Case, Graph, Tensor, load_arrays

TRIED_CASES = 4  # of a graph, on which faults are planted
EXPLAINED = 0.9  # share of the elements that a cause must give
SAME_FACTOR = 0.01  # relative difference of two scales that counts as none
SHIFTED_SHARE = 0.5  # of the vectors, that have the outputs of others
CLEAR_SHIFT = 2  # steps; less is rounding


class Pair(NamedTuple):
    """One output of one vector: the golden integers and the device's."""

    case: Case
    tensor: Tensor
    golden: np.ndarray
    found: np.ndarray

    def used(self, values: np.ndarray) -> np.ndarray:
        """Rows in use, as signed integers that can be subtracted."""
        return self.tensor.in_use(values, self.case.rows).astype(np.int64)


def likely_causes(
    folder: Path, bundle: Bundle, graph: str, pairs: Sequence[Pair], failed: Collection[tuple[str, str]]
) -> list[str]:
    """Causes in words, for the `failed` (case, tensor) of one graph; at least one."""
    wrong = [pair for pair in pairs if (pair.case.id, pair.tensor.name) in failed]
    causes: list[str] = []
    explained = set()
    for tensor in bundle.graphs[graph].outputs:
        own = [pair for pair in wrong if pair.tensor.name == tensor.name]
        words = next(_reading_faults(tensor, own, bundle.graphs[graph]), "") if own else ""
        if words:
            causes.append(f"{tensor.name}: {words}")
            explained.add(tensor.name)
    if all(pair.tensor.name in explained for pair in wrong):
        return causes
    if _order_is_wrong(pairs):
        return [*causes, "the outputs of other golden vectors: they came back in another order than the input list"]
    planted = _planted(folder, bundle, graph, pairs, wrong)
    return [*causes, *(planted or [_where_it_begins(bundle.graphs[graph], {pair.tensor.name for pair in wrong})])]


def _reading_faults(tensor: Tensor, pairs: Sequence[Pair], graph: Graph) -> Iterator[str]:
    wanted = np.concatenate([pair.used(pair.golden).ravel() for pair in pairs])
    found = np.concatenate([pair.used(pair.found).ravel() for pair in pairs])
    if np.ptp(found) == 0:
        yield f"every element is {found.flat[0]}: the buffer was never written, or another one was read"
        return
    if tensor.scale is not None and tensor.zero_point is not None:
        yield from _affine_faults(tensor, wanted, found, graph)
    if np.dtype(tensor.dtype).itemsize > 1 and _mostly(
        tensor, wanted, found.astype(tensor.dtype).byteswap().astype(np.int64)
    ):
        yield "its bytes are in the other order (big-endian)"
    for axes in permutations(range(len(tensor.shape))):
        shape = [tensor.shape[axis] for axis in axes]
        whole = [pair.found.reshape(shape).transpose(np.argsort(axes)) for pair in pairs]
        back = np.concatenate([pair.used(one).ravel() for pair, one in zip(pairs, whole, strict=True)])
        if _mostly(tensor, wanted, back) and not np.array_equal(back, found):
            yield f"it is written with its axes in the order {list(axes)}: transposed"
            return


def _affine_faults(tensor: Tensor, wanted: np.ndarray, found: np.ndarray, graph: Graph) -> Iterator[str]:
    """found = factor * wanted + offset, where neither side is clipped."""
    limits = np.iinfo(tensor.dtype)
    inner = (found > limits.min) & (found < limits.max) & (wanted > limits.min) & (wanted < limits.max)
    x, y = wanted[inner].astype(np.float64), found[inner].astype(np.float64)
    if len(x) < 2 or np.ptp(x) == 0:
        return
    factor, offset = np.polyfit(x, y, 1)
    slack = max(1.0, abs(factor)) * (tensor.tolerance_steps or 1)
    if factor <= 0 or np.mean(np.abs(factor * x + offset - y) <= slack) < EXPLAINED:
        return
    assert tensor.scale is not None and tensor.zero_point is not None
    if abs(factor - 1) < SAME_FACTOR:
        shift = float(np.median(y - x))
        if abs(shift) >= CLEAR_SHIFT:
            yield (
                f"every integer is {shift:+.0f} off: wrong zero point, {tensor.zero_point + shift:.0f} was taken for "
                f"{tensor.zero_point}"
            )
        return
    others = [one for one in (*graph.inputs, *graph.outputs) if one.scale and one.name != tensor.name]
    used = tensor.scale / factor
    same = dict.fromkeys(one.name for one in others if one.scale and abs(one.scale / used - 1) < SAME_FACTOR)
    whose = f", which is that of {', '.join(list(same)[:3])}" if same else ""
    wrong = f"wrong scale, {used:.6g} was taken for {tensor.scale:.6g}{whose}"
    yield f"its values are {factor:.4g} times what they should be: {wrong}"


def _mostly(tensor: Tensor, wanted: np.ndarray, found: np.ndarray) -> bool:
    """Are these the wanted integers but for rounding."""
    return bool(np.mean(np.abs(wanted - found) <= (tensor.tolerance_steps or 0)) >= EXPLAINED)


def _order_is_wrong(pairs: Sequence[Pair]) -> bool:
    """Do most vectors have the golden outputs of another one, and not their own."""
    for name in {pair.tensor.name for pair in pairs}:
        own = [pair for pair in pairs if pair.tensor.name == name]
        moved = [
            not _mostly(pair.tensor, pair.used(pair.golden), pair.used(pair.found))
            and any(_mostly(other.tensor, other.used(other.golden), other.used(pair.found)) for other in own)
            for pair in own
        ]
        if np.mean(moved) > SHIFTED_SHARE:
            return True
    return False


def _where_it_begins(graph: Graph, wrong: Collection[str]) -> str:
    """Without a fault that explains it: what the first wrong tensor depends on."""
    names = [tensor.name for tensor in graph.outputs]
    if wrong == {"logits"}:
        return "only the logits are off: look at the output layer, and whether this binary is the bundle's"
    k_new = sorted((name for name in names if name.startswith("k_new.")), key=lambda name: int(name[6:]))
    if not k_new:
        return (
            "no fault with a name gives these ids: compare the inputs that were fed with the golden ones byte by byte"
        )
    first = k_new[0]
    value = first.replace("k_", "v_")
    if first in wrong and value not in wrong:
        return f"{first} is off and {value} is not: look at the rotary tables and positions"
    if first not in wrong:
        return f"{first} is right and later layers are not: look at rings and masks"
    return f"{first} and {value} are off already: look at the embeddings, their tables, factor and encoding"


# ---- faults of filling the inputs


def _planted(folder: Path, bundle: Bundle, graph: str, pairs: Sequence[Pair], wrong: Sequence[Pair]) -> list[str]:
    """Faults that make the integer graph give what the device gave."""
    from hyco_export.graph.parity import ReferenceSession

    session = ReferenceSession(folder / bundle.graphs[graph].integer_graph)
    specs = [tensor.spec for tensor in bundle.graphs[graph].inputs]
    ids = list(dict.fromkeys(pair.case.id for pair in wrong))[:TRIED_CASES]
    chosen = [pair for pair in pairs if pair.case.id in ids]
    inputs = {pair.case.id: load_arrays(folder, pair.case.inputs, specs) for pair in chosen}
    before = _explained(chosen, {pair.case.id: {} for pair in chosen})
    scores: dict[str, float] = {}
    for words, plant in faults(bundle, graph).items():
        planted = {case: plant({name: array.copy() for name, array in feeds.items()}) for case, feeds in inputs.items()}
        if all(np.array_equal(planted[case][name], inputs[case][name]) for case in inputs for name in inputs[case]):
            continue
        outputs = {case: session.run(feeds) for case, feeds in planted.items()}
        scores[words] = _explained(chosen, outputs)
    best = max(scores.values(), default=0.0)
    if best < EXPLAINED or best <= before:
        return []
    return [words for words, score in scores.items() if score == best]


def _explained(pairs: Sequence[Pair], outputs: Mapping[str, Mapping[str, np.ndarray]]) -> float:
    """Mean share of elements that `outputs`, or the golden ones where there are none, have as the device has them."""
    shares = []
    for pair in pairs:
        given = pair.used(outputs[pair.case.id].get(pair.tensor.name, pair.golden))
        shares.append(np.mean(np.abs(given - pair.used(pair.found)) <= (pair.tensor.tolerance_steps or 0)))
    return float(np.mean(shares))
