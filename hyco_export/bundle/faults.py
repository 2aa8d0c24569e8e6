"""Faults of filling a graph's inputs, by name: each is a function that plants it in golden inputs.

Names say what is wrong and what is right. Legend: R rows of a pass, W ring slots, N kv heads, d head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from hyco_export.bundle.spec import Bundle, Tensor
from hyco_export.core.device_spec import HEAD_GRAPH

Feeds = dict[str, np.ndarray]
Plant = Callable[[Feeds], Feeds]
Tensors = Mapping[str, Tensor]
RINGS, TABLES, MASKS = ("k", "v"), ("cos", "sin"), ("mask",)


def faults(bundle: Bundle, graph: str) -> dict[str, Plant]:
    """All faults that the inputs of a graph can have."""
    tensors = {tensor.name: tensor for tensor in bundle.graphs[graph].inputs}
    part = bundle.head if graph == HEAD_GRAPH else bundle.slm
    found = {**_ring_faults(tensors), **_table_faults(tensors, part["inv_freq"])}
    found |= _mask_faults(tensors, rows_of_a_pass=graph != HEAD_GRAPH)
    for name, tensor in tensors.items():
        if tensor.scale is not None and _kind(name) not in (*MASKS, *TABLES):
            found |= _encoding_faults(name, tensor, tensors)
    return found


def _kind(name: str) -> str:
    """`mask` of `mask.full`."""
    return name.partition(".")[0]


def _every(tensors: Tensors, kinds: Sequence[str], change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """`change` in all inputs of these kinds."""
    names = [name for name in tensors if _kind(name) in kinds]
    return lambda feeds: feeds | {name: change(feeds[name]) for name in names}


def _exchanged(tensors: Tensors, one: str, other: str) -> Plant:
    pairs = [(name, name.replace(one, other, 1)) for name in tensors if _kind(name) == one]
    fitting = [(a, b) for a, b in pairs if b in tensors and tensors[a].shape == tensors[b].shape]
    return lambda feeds: feeds | {a: feeds[b] for a, b in fitting} | {b: feeds[a] for a, b in fitting}


def _ring_faults(tensors: Tensors) -> dict[str, Plant]:
    def emptied(feeds: Feeds) -> Feeds:
        names = [name for name in tensors if _kind(name) in RINGS]
        return feeds | {name: np.full_like(feeds[name], tensors[name].zero_point) for name in names}

    def by_slot(levels: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(levels.transpose(1, 0, 2)).reshape(levels.shape)

    right = "(position p belongs in slot p mod W)"
    return {
        f"rings: every row is one slot too far {right}": _every(tensors, RINGS, partial(np.roll, shift=1, axis=1)),
        f"rings: every row is one slot too early {right}": _every(tensors, RINGS, partial(np.roll, shift=-1, axis=1)),
        "rings: heads and slots are exchanged in memory ([N, W, d] is asked for)": _every(tensors, RINGS, by_slot),
        "rings: they are empty": emptied,
        "rings: K and V are exchanged": _exchanged(tensors, "k", "v"),
    }


def _table_faults(tensors: Tensors, inv_freq: Mapping[str, Sequence[float]]) -> dict[str, Plant]:
    def unsigned(feeds: Feeds) -> Feeds:
        changed = {}
        for name in [name for name in tensors if _kind(name) == "sin"]:
            half = feeds[name].shape[1] // 2
            changed[name] = np.concatenate([feeds[name][:, half:], feeds[name][:, half:]], axis=1)
        return feeds | changed

    def by_pair(levels: np.ndarray) -> np.ndarray:
        return levels.reshape(len(levels), 2, -1).transpose(0, 2, 1).reshape(levels.shape)

    def turned(levels: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(levels.T).reshape(levels.shape)

    return {
        "rotary tables: cos and sin are exchanged": _exchanged(tensors, "cos", "sin"),
        "rotary tables: the first half of sin lacks its sign": unsigned,
        "rotary tables: transposed in memory ([R, d] is asked for)": _every(tensors, TABLES, turned),
        "rotary tables: pairs stand side by side; two halves are asked for": _every(tensors, TABLES, by_pair),
        "rotary tables: they are empty": _every(tensors, TABLES, np.zeros_like),
        "rotary tables: every position is one too large": partial(_moved, tensors, inv_freq, 1),
        "rotary tables: every position is one too small": partial(_moved, tensors, inv_freq, -1),
    }


def _moved(tensors: Tensors, inv_freq: Mapping[str, Sequence[float]], distance: int, feeds: Feeds) -> Feeds:
    """Rotary tables of positions that are `distance` further."""
    moved: Feeds = {}
    for kind, frequencies in inv_freq.items():
        names = (f"cos.{kind}", f"sin.{kind}")
        encodings = [tensors[name].spec.encoding for name in names if name in tensors]
        if len(encodings) < len(names):
            continue
        cos, sin = (one.dequantize(feeds[name]) for one, name in zip(encodings, names, strict=True) if one)
        half, turn = cos.shape[1] // 2, np.asarray(frequencies) * distance
        cosine = cos[:, half:] * np.cos(turn) - sin[:, half:] * np.sin(turn)
        sine = sin[:, half:] * np.cos(turn) + cos[:, half:] * np.sin(turn)
        tables = (np.concatenate([cosine, cosine], axis=1), np.concatenate([-sine, sine], axis=1))
        moved |= {name: one.quantize(real) for name, one, real in zip(names, encodings, tables, strict=True) if one}
    return feeds | moved


def _mask_faults(tensors: Tensors, rows_of_a_pass: bool) -> dict[str, Plant]:
    def inverted(levels: np.ndarray) -> np.ndarray:
        return (levels.max() - levels + levels.min()).astype(levels.dtype)

    def rows_first(levels: np.ndarray) -> np.ndarray:
        return np.roll(levels, len(levels), axis=1)

    found = {
        "masks: visible and hidden are exchanged": _every(tensors, MASKS, inverted),
        "masks: every position is visible": _every(tensors, MASKS, lambda levels: np.full_like(levels, levels.max())),
        "masks: every slot is one too far": _every(tensors, MASKS, partial(np.roll, shift=1, axis=1)),
    }
    if rows_of_a_pass:
        words = "masks: the rows of the pass come before the ring's slots; slots come first"
        found[words] = _every(tensors, MASKS, rows_first)
    return found


def _encoding_faults(name: str, tensor: Tensor, tensors: Tensors) -> dict[str, Plant]:
    """One input written in an encoding that is not its own."""
    own_scale, own_zero = tensor.scale, tensor.zero_point
    assert own_scale is not None and own_zero is not None
    limits = np.iinfo(tensor.dtype)
    found: dict[str, Plant] = {}

    def rewritten(scale: float, zero_point: int) -> Plant:
        def plant(feeds: Feeds) -> Feeds:
            real = (feeds[name].astype(np.float64) - own_zero) * own_scale
            levels = np.clip(np.rint(real / scale) + zero_point, limits.min, limits.max)
            return feeds | {name: levels.astype(tensor.dtype)}

        return plant

    middle = (int(limits.max) + 1) // 2
    for zero_point in sorted({0, middle} - {own_zero}):
        found[f"{name}: wrong zero point, {zero_point} was taken for {own_zero}"] = rewritten(own_scale, zero_point)
    for other in tensors.values():
        comparable = other.dtype == tensor.dtype and _kind(other.name) not in (*MASKS, *TABLES)
        if comparable and other.scale and other.scale != tensor.scale:
            found[f"{name}: wrong scale, that of {other.name}"] = rewritten(other.scale, own_zero)
    found[f"{name}: it is empty"] = lambda feeds: feeds | {name: np.full_like(feeds[name], own_zero)}
    return found
