"""Ranges of the head's tensors over captured sequences (HyCo, Appendix A): of the hand-off, and of every activation.

Activations are those of the head as the device runs it: on 8-bit hand-off values and a window of W positions, each step
on the head's own last token and state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.network.host import draft_feeds, on_grid, shared_positions
from hyco_export.models.capture import Capture, load_capture
from hyco_export.models.head.static_pass import FloatHead
from hyco_export.models.torch_ops import RangeObserver

ROOTS_PER_PASS = 16  # consecutive roots, which share one window; the observer needs passes of equal size
EXTREMES = 100.0  # as a percentile: minimum and maximum


def recorded(capture: Capture) -> dict[str, np.ndarray]:
    """A capture's hand-off in float32: e, h [T, H]; k.<type>, v.<type> [T, N, d]."""
    return {name: tensor.float().numpy() for name, tensor in capture.handoff_tensors().items()}


def captured_ranges(paths: Sequence[Path], percentile: float) -> dict[str, tuple[float, float]]:
    """The (100 - p)th and the p-th percentile of every hand-off tensor over all captures, by name."""
    names = load_capture(paths[0]).handoff_tensors()
    ranges = {}
    for name in names:  # one tensor of all sequences in memory at a time
        values = np.concatenate([recorded(load_capture(path))[name].ravel() for path in paths])
        low, high = np.percentile(values, (100.0 - percentile, percentile))
        ranges[name] = (float(low), float(high))
    return ranges


def clipped_shares(paths: Sequence[Path], encodings: Mapping[str, Encoding]) -> dict[str, float]:
    """Share of the captured values outside the range of their encoding, by tensor."""
    outside, counts = dict.fromkeys(encodings, 0), dict.fromkeys(encodings, 0)
    for path in paths:
        for name, values in recorded(load_capture(path)).items():
            encoding = encodings[name]
            info = np.iinfo(encoding.dtype)
            levels = np.rint(values / encoding.scale) + encoding.zero_point
            outside[name] += int(((levels < info.min) | (levels > info.max)).sum())
            counts[name] += values.size
    return {name: outside[name] / counts[name] for name in encodings}


def activation_ranges(
    head: FloatHead,
    paths: Sequence[Path],
    encodings: Mapping[str, Encoding],
    mask_value: float,
    report: Callable[[int], None],
) -> dict[str, tuple[float, float]]:
    """Minimum and maximum of every tensor of the network over the responses of the captures, by name.

    Not percentiles: 16 bits are fine enough for the whole range, and cut values decide drafts. On the embedded family
    98.3 % of the ids equal the float head's at the 99.99th percentile, 99.8 % at the 99.999th, and 100 % here.

    Args:
        encodings: of the hand-off.
        report: called with the number of captures that are done.
    """
    passes = sum(len(_groups(load_capture(path))) for path in paths)
    observer = RangeObserver(EXTREMES, passes)
    for done, path in enumerate(paths, 1):
        for feeds in response_feeds(head, load_capture(path), encodings, mask_value):
            head.draft(feeds, observer)
        report(done)
    return observer.ranges()


def response_feeds(
    head: FloatHead, capture: Capture, encodings: Mapping[str, Encoding], mask_value: float
) -> Iterator[dict[str, np.ndarray]]:
    """Real-valued feeds of all response roots, ROOTS_PER_PASS at a time; the last root fills up the last pass."""
    values = on_grid(recorded(capture), encodings)
    for roots in _groups(capture):
        keys = shared_positions(roots, head.network.window)
        yield draft_feeds(head.network, values, roots, keys, mask_value)


def _groups(capture: Capture) -> list[np.ndarray]:
    roots = capture.roots
    starts = range(roots.start, roots.stop, ROOTS_PER_PASS)
    return [np.minimum(np.arange(start, start + ROOTS_PER_PASS), roots.stop - 1) for start in starts]


def spread_roots(capture: Capture, count: int) -> np.ndarray:
    """At most `count` response roots, evenly spread."""
    roots = capture.roots
    return np.unique(np.linspace(roots.start, roots.stop - 1, min(count, len(roots))).round().astype(np.int64))
