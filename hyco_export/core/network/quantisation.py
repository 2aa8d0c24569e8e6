"""Quantisation parameters of every tensor of head and SLM, from calibrated ranges (HyCo, Appendix A). Pure numpy.

The hand-off has 8 bits on fixed ranges, the percentiles of the captures; activations have 16 bits on the ranges seen in
calibration; rotary tables and masks have fixed ranges; K/V of the SLM has 8 bits, centred on 0, or 16 where asked for.
"""

from collections.abc import Collection, Mapping

import numpy as np

from hyco_export.core.encodings import Encoding, encoding_from_range, symmetric_encoding
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.network.blocks import Ranges, cut_where_flat
from hyco_export.core.network.head import HeadNetwork, logits_name
from hyco_export.core.network.slm import SlmNetwork

HIDDEN_TENSORS = ("e", "h")
WIDE_KV_ROOM = 4.0  # of 16-bit K/V beside 8-bit ones: two of the 8 bits more, so that nothing is clipped
LOGIT_MARGIN = 1.25  # clipped logits would tie at the top, and argmax takes the first; costs a third of a bit


def handoff_encodings(ranges: Ranges) -> dict[str, Encoding]:
    """8-bit encodings of e, h, k.<type>, v.<type> from their captured ranges.

    K and V are centred on 0: as second operands of a MatMul on HTP, other zero points cost 30 dB.
    """
    encodings = {name: encoding_from_range(*ranges[name], "uint8") for name in HIDDEN_TENSORS}
    for name in ranges.keys() - encodings.keys():
        encodings[name] = symmetric_encoding(max(map(abs, ranges[name])), "uint8")
    return dict(sorted(encodings.items()))


def head_encodings(
    network: HeadNetwork, ranges: Ranges, handoff: Mapping[str, Encoding], mask_value: float
) -> dict[str, Encoding]:
    """Encodings by tensor name. `ranges` are those of calibration; inputs keep the hand-off's encodings."""
    encodings = {name: encoding_from_range(low, high, "uint16") for name, (low, high) in ranges.items()}
    for step in range(1, network.steps + 1):
        if network.joins_inputs:  # one encoding for embedding and state: they are joined before the first matrix
            lows, highs = zip(*(ranges[f"step{step}.{part}"] for part in ("embedded", "carried")), strict=True)
            encodings[f"step{step}.joined"] = encoding_from_range(min(lows), max(highs), "uint16")
        low, high = ranges[logits_name(step)]
        encodings[logits_name(step)] = encoding_from_range(low, high * LOGIT_MARGIN, "uint16")
    for layer_type in LAYER_TYPES:
        encodings[f"cos.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"sin.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"mask.{layer_type}"] = encoding_from_range(mask_value, 0.0, "uint16")
    return {**encodings, **handoff}


def kv_range_names(network: SlmNetwork) -> tuple[str, ...]:
    """The tensors whose magnitudes decide the K/V encodings: this pass's own rows, named like the outputs."""
    return tuple(f"{kind}_new.{layer.index}" for layer in network.storing for kind in ("k", "v"))


def slm_encodings(
    network: SlmNetwork,
    ranges: Ranges,
    margin: float,
    kv_margin: float,
    mask_value: float,
    wide_kv: Collection[str] = (),
) -> dict[str, Encoding]:
    """Encodings by tensor name.

    Args:
        ranges: must have the names of `kv_range_names` as (-m, m).
        margin, kv_margin: times these ranges; of K and V the second.
        wide_kv: rings of 16 bits, `k.<i>` or `v.<i>`.
    """
    wide = {name: (margin * low, margin * high) for name, (low, high) in ranges.items()}
    encodings = {name: encoding_from_range(*bounds, "uint16") for name, bounds in cut_where_flat(wide).items()}
    for layer_type in network.rings:
        encodings[f"cos.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"sin.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"mask.{layer_type}"] = encoding_from_range(mask_value, 0.0, "uint16")
    for name in kv_range_names(network):
        ring = name.replace("_new", "")
        encodings[name] = encodings[ring] = kv_encoding(kv_margin * ranges[name][1], ring in wide_kv)
    return encodings


def rewidened(kv: Encoding, wide: bool) -> Encoding:
    """The encoding that a ring would have in 8 bits, or in 16."""
    magnitude = (np.iinfo(kv.dtype).max - kv.zero_point) * kv.scale
    return kv_encoding(magnitude / (WIDE_KV_ROOM if kv.dtype == "uint16" else 1.0), wide)


def kv_encoding(magnitude: float, wide: bool) -> Encoding:
    """Of a ring whose values rarely are greater than `magnitude`: 8 bits, or 16."""
    if wide:
        return symmetric_encoding(WIDE_KV_ROOM * magnitude, "uint16")
    return symmetric_encoding(magnitude, "uint8")
