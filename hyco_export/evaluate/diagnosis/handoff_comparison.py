"""Compares hand-off values with what they should be, and tells how well a hypothesis explains them.

Also where the server's sliding window ends: at the first position whose K/V differ.

Legend: n rows, D values of a row, T positions of a golden text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.numerics import EXACT_DB, decibels
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.server_probe import PRIME, ROUND, Call, Seen

KV_TENSORS = tuple(f"{kind}.{layer_type}" for layer_type in LAYER_TYPES for kind in ("k", "v"))
TENSORS = ("e", "h", *KV_TENSORS)

GoldenText = Mapping[str, np.ndarray]
"""By tensor name, float32 [T, D]: the values at every position of one text."""


@dataclass(frozen=True)
class Part:
    """Rows of one tensor from one hand-off: `live` real [n, D] and their integers, at `positions` [n] of a text."""

    encoding: Encoding
    call: Call
    live: np.ndarray
    integers: np.ndarray
    positions: np.ndarray
    golden: np.ndarray  # [T, D], the whole text

    def reference(self, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Golden rows [n, D] of positions + shift, and which of them exist, bool [n]."""
        wanted = self.positions + shift
        exists = (wanted >= 0) & (wanted < len(self.golden))
        return self.golden[np.clip(wanted, 0, len(self.golden) - 1)], exists

    def on_grid(self, values: np.ndarray) -> np.ndarray:
        """Real values as they would arrive."""
        return self.encoding.dequantize(self.encoding.quantize(values))

    @property
    def inside(self) -> np.ndarray:
        """bool [n, D]: values that the grid's ends did not clip."""
        info = np.iinfo(self.encoding.dtype)
        return (self.integers > info.min) & (self.integers < info.max)


def parts_of(name: str, seen: Sequence[Seen], golden: Sequence[GoldenText], encoding: Encoding) -> list[Part]:
    """All rows of a tensor that can be compared; e only where the root is the text's own token."""
    found = []
    for one in seen:
        if name == "e" and not one.root_is_texts:
            continue
        integers, positions = _rows(name, one)
        inside = (positions >= 0) & (positions < len(golden[one.text][name]))
        rows = integers[inside]
        found.append(
            Part(encoding, one.call, encoding.dequantize(rows), rows, positions[inside], golden[one.text][name])
        )
    return found


def _rows(name: str, one: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Integers [n, D] and their positions [n]."""
    if name in ("e", "h"):
        payload = one.handoff.e if name == "e" else one.handoff.h
        return np.frombuffer(payload, np.uint8)[None], np.array([one.root if name == "e" else one.root - 1])
    kind, layer_type = name.split(".")
    rows = (one.rows.k if kind == "k" else one.rows.v)[layer_type]
    return rows.reshape(one.rows.count, -1), one.handoff.first_position + np.arange(one.rows.count)


Predict = Callable[[Part], tuple[np.ndarray, np.ndarray]]
"""A hypothesis: the real values [n, D] that a part should hold, and which rows it can tell, bool [n]."""


def explained_db(parts: Iterable[Part], predict: Predict) -> float:
    """Signal to noise ratio of a hypothesis, its values on the tensor's grid; -EXACT_DB where it tells no row."""
    signal = noise = 0.0
    for part in parts:
        values, told = predict(part)
        wanted = part.on_grid(values[told]).astype(np.float64)
        signal += float(np.sum(wanted**2))
        noise += float(np.sum((part.live[told] - wanted) ** 2))
    return decibels(signal, noise) if signal else -EXACT_DB


@dataclass(frozen=True)
class Line:
    """live = slope * golden + offset over values that are not clipped; `db` tells how well that explains them."""

    slope: float
    offset: float
    db: float


def fitted_line(parts: Sequence[Part]) -> Line:
    """Least squares over all values strictly inside the grid whose golden value is above its rounding."""
    live, golden = [], []
    for part in parts:
        wanted, exists = part.reference()
        usable = exists[:, None] & part.inside & (np.abs(wanted) > part.encoding.scale)
        live.append(part.live[usable])
        golden.append(wanted[usable])
    x, y = (np.concatenate(each).astype(np.float64) if each else np.zeros(0) for each in (golden, live))
    if len(x) < 2 or not np.ptp(x):
        return Line(0.0, 0.0, -EXACT_DB)
    slope, offset = np.polyfit(x, y, 1)
    fitted = slope * x + offset
    noise = float(np.sum((y - fitted) ** 2))
    signal = float(np.sum((fitted - fitted.mean()) ** 2))
    return Line(float(slope), float(offset), decibels(signal, noise))


RATIO = 2.0  # of the noise beyond the edge to that before it: rounding does not know the window (bfloat16: 1.05)
FLOOR = 1e-5  # of the power: single integers that round the other way; a window of 64 off by one gave 3e-4
FEWEST = 4  # positions on each side
SMALLEST_SHARE = 16  # of the window: shorter ones are not looked for, a text's first positions have noise of their own


def window_finding(tensors: Mapping[str, Sequence[Part]], window: int) -> Finding | None:
    """The finding of a server whose sliding layers see another number of positions than `window`."""
    for call, where in ((PRIME, "the server"), (ROUND, "the server's verify rounds")):
        noise = noise_by_position(tensors, call)
        edge = first_changed(noise, window)
        if edge is None:
            continue
        kept = f"{edge}" if edge < window else f"more than {window}"
        before, after = np.nanmean(noise[:edge]), np.nanmean(noise[edge:])
        seen = (
            f"K/V are right before position {edge} and wrong from it on (noise {before:.1e} against {after:.1e} "
            f"of the signal): sliding layers see {kept} positions, the verifier's {window}"
        )
        hint = "compare sliding_window in the served checkpoint's config with the captured one's; if equal, report it"
        return Finding("sliding window", where, seen, hint)
    return None


def noise_by_position(tensors: Mapping[str, Sequence[Part]], call: Call) -> np.ndarray:
    """Mean square of live - golden over the tensor's power [P]; NaN where no hand-off of these calls has a row."""
    chosen = {name: [part for part in parts if part.call == call] for name, parts in tensors.items()}
    ends = [int(part.positions[-1]) for parts in chosen.values() for part in parts if len(part.positions)]
    length = max(ends, default=-1) + 1
    total, count = np.zeros(length), np.zeros(length)
    for parts in chosen.values():
        power = np.mean([np.mean(part.golden**2) for part in parts]) if parts else 1.0
        for part in parts:
            wanted, _ = part.reference()
            np.add.at(total, part.positions, np.mean((part.live - part.on_grid(wanted)) ** 2, axis=1) / power)
            np.add.at(count, part.positions, 1)
    noise = np.full(length, np.nan)
    np.divide(total, count, out=noise, where=count > 0)
    return noise


def first_changed(noise: np.ndarray, window: int) -> int | None:
    """The position up to `window` from which on K/V differ, if they do: where two levels of noise tell most."""
    known = np.flatnonzero(np.isfinite(noise))
    if np.sum(known >= window) < FEWEST or np.sum(known < window - 1) < FEWEST:
        return None
    level = noise + FLOOR
    best: tuple[float, int] | None = None
    for edge in range(max(FEWEST, window // SMALLEST_SHARE), window + 1):
        before, after = (level[known[chosen]] for chosen in (known < edge, known >= edge))
        if len(before) < FEWEST:
            continue
        # log-likelihood of a Gaussian noise of one power before the edge and another after it
        surprise = len(before) * np.log(before.mean()) + len(after) * np.log(after.mean())
        if after.mean() > RATIO * before.mean() and (best is None or surprise < best[0]):
            best = (float(surprise), edge)
    return None if best is None else best[1]
