"""Outlier channels of the SLM's residual stream: found over calibration text, and split into copies.

One channel of Gemma 3 270M reaches 41,000 in every row, where the median of the others is 0.85: a 16-bit tensor that
holds it has steps as large as they are. What a split is stands in `core.network.slm`; here is who gets how many copies.

Legend: H hidden.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch

from hyco_export.core.network.host import AttentionSink, EmbeddingRows, SlmHost
from hyco_export.core.network.slm import SlmNetwork, stream_tensors
from hyco_export.models.slm.calibration import Ids, first_passes, full_passes
from hyco_export.models.slm.static_pass import FloatSlm

Peaks = Mapping[str, np.ndarray]
"""By tensor of the stream: the greatest magnitude of each channel, float32 [H]."""

SCANNED_PASSES = 8  # 256 rows: an outlier channel is one in every row, more text finds no other
OUTLIER_RATIO = 64.0  # of a tensor's greatest channel to its median one: below it 16 bits leave every channel 10
COPIES_PER_BIT = 4  # n copies are smaller by n^0.5


def channel_peaks(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    sink: AttentionSink | None = None,
) -> dict[str, np.ndarray]:
    """Peaks over the first passes of the sequences, as many of each as of the others.

    Args:
        sink: of every sequence, which then begin after it.
    """
    wanted = frozenset(stream_tensors(slm.network))
    peaks: dict[str, np.ndarray] = {}

    def observe(name: str, values: torch.Tensor) -> None:
        if name in wanted:
            seen = values.abs().amax(dim=0).numpy()
            peaks[name] = np.maximum(peaks[name], seen) if name in peaks else seen

    for parts in first_passes([full_passes(ids, rows) for ids in sequences], SCANNED_PASSES):
        host = SlmHost(slm.network, embeddings, rows, mask_value, sink=sink)
        for part in parts:
            host.append(lambda feeds: slm.tree(feeds, observe), part)
    return peaks


def choose_copies(peaks: Peaks, most: int) -> dict[int, int]:
    """Copies by channel, for as many bits of every tensor with outliers as `most` further columns can win.

    To win b bits no channel may be greater than 2^-b of the tensor's greatest: one that is gets a power of 4 copies, so
    that the factor n^-0.5 is a power of 2 and changes no digit of a float.
    """
    tall = [peak for peak in peaks.values() if peak.max() > OUTLIER_RATIO * np.median(peak)]
    chosen: dict[int, int] = {}
    for bits in range(1, 1 + most):
        counts = np.ones(max((len(peak) for peak in tall), default=0), np.int64)
        for peak in tall:
            excess = np.log2(np.maximum(peak / peak.max() * 2.0**bits, 1.0))
            counts = np.maximum(counts, COPIES_PER_BIT ** np.ceil(excess).astype(np.int64))
        if not len(counts) or np.sum(counts - 1) > most:
            break
        chosen = {int(channel): int(counts[channel]) for channel in np.flatnonzero(counts > 1)}
    return chosen


def bits_won(peaks: Peaks, network: SlmNetwork) -> float:
    """Mean over the tensors with outliers: log2 of how much smaller the copies make a tensor's range."""
    factors = np.ones(network.hidden)
    for channel, count in network.copies.items():
        factors[channel] = count**-0.5
    won = [np.log2(p.max() / (p * factors).max()) for p in peaks.values() if p.max() > OUTLIER_RATIO * np.median(p)]
    return float(np.mean(won)) if won else 0.0


def largest_difference(
    one: FloatSlm,
    other: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    max_passes: int,
    sink: AttentionSink | None = None,
) -> float:
    """Of the logits of two networks that must be equal, each with its own K/V, in standard deviations of the first's.

    Args:
        max_passes: full passes of the sequences, the first ones.
    """
    largest, spread = 0.0, 0.0
    passes = ((number, part) for ids in sequences for number, part in enumerate(full_passes(ids, rows)))
    for number, part in islice(passes, max_passes):
        if number == 0:
            hosts = [SlmHost(slm.network, embeddings, rows, mask_value, sink=sink) for slm in (one, other)]
        wanted, found = (host.append(slm.tree, part)["logits"] for host, slm in zip(hosts, (one, other), strict=True))
        largest, spread = max(largest, float(np.abs(wanted - found).max())), max(spread, float(wanted.std()))
    return largest / spread if spread else largest
