"""The host's part of drafting over recorded hand-offs, in real numbers: calibration, parity and sample feeds.

The device's own host works on the ring's bytes (`runtime.devices`). Pure numpy.

Legend: T positions of a recorded sequence, R roots, S key positions, H the verifier's hidden size, N kv heads, d head
dim.
"""

from collections.abc import Mapping

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.ring import EMPTY, ring_span, slot_positions, visible
from hyco_export.core.rotary import rotary_tables

Recorded = Mapping[str, np.ndarray]
"""One sequence: e, h [T, H]; k.<type>, v.<type> [T, N, d]; real values."""


def on_grid(recorded: Recorded, encodings: Mapping[str, Encoding]) -> dict[str, np.ndarray]:
    """The values that arrive when each tensor travels as integers of its encoding."""
    return {name: encodings[name].dequantize(encodings[name].quantize(values)) for name, values in recorded.items()}


def ring_positions(root: int, window: int) -> np.ndarray:
    """Position in each slot [W] of the device's ring when it drafts for `root`."""
    return slot_positions(root, window)


def shared_positions(roots: np.ndarray, window: int) -> np.ndarray:
    """Positions [W + R - 1] that consecutive roots [R] see between them; EMPTY before the sequence."""
    width = window + len(roots) - 1
    positions = np.arange(roots[-1] - width, roots[-1])
    return np.where(positions < 0, EMPTY, positions)


def draft_feeds(
    network: HeadNetwork, recorded: Recorded, roots: np.ndarray, keys: np.ndarray, mask_value: float
) -> dict[str, np.ndarray]:
    """Real inputs for drafting at `roots` [R] (each >= 1) with K/V of positions `keys` [S] in this order."""
    feeds = {"e": recorded["e"][roots], "h": recorded["h"][roots - 1]}
    exists = (keys != EMPTY)[:, None, None]
    for layer_type in LAYER_TYPES:
        cos, sin = rotary_tables(roots, network.architecture.inv_freq[layer_type])
        feeds[f"cos.{layer_type}"], feeds[f"sin.{layer_type}"] = cos, sin
        for kind in ("k", "v"):
            rows = np.where(exists, recorded[f"{kind}.{layer_type}"][keys], np.float32(0.0))  # [S, N, d]
            feeds[f"{kind}.{layer_type}"] = np.ascontiguousarray(rows.transpose(1, 0, 2))
        span = ring_span(network.architecture.spans[layer_type], network.window)
        seen = visible(roots, keys, span) & (keys[None] < roots[:, None])  # roots of one sequence stand side by side
        feeds[f"mask.{layer_type}"] = np.where(seen, 0.0, mask_value).astype(np.float32)
    return feeds
