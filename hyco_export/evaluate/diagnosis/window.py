"""Does the server's sliding window end where the verifier's does? Told from the first position whose K/V differ.

A position sees itself and the window - 1 before it, so up to window - 1 every window gives the same. A window of w' < w
changes position w' and all later ones; a longer one changes position w, where the right one lets the first go. Pure.

Legend: P positions.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.series import Part
from hyco_export.evaluate.diagnosis.walk import PRIME, ROUND, Call

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
    return np.divide(total, count, out=np.full(length, np.nan), where=count > 0)


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
