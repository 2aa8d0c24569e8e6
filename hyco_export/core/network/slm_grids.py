"""Which integer grid every tensor of the SLM gets, from its calibrated range (HyCo, Appendix A). Values only.

Activations have 16 bits on the range seen, with a margin; K/V have 8 bits, symmetric, with a margin of
their own; tables and masks have fixed ranges. The checkpoint's own activation scales (8 bits) are not used.
"""

from hyco_export.core.encodings import Encoding, encoding_from_range, symmetric_encoding
from hyco_export.core.network.blocks import Ranges, cut_where_flat
from hyco_export.core.network.slm import SlmNetwork


def kv_range_names(network: SlmNetwork) -> tuple[str, ...]:
    """The tensors whose magnitudes decide the K/V grids: this pass's own rows, named like the outputs."""
    return tuple(f"{kind}_new.{layer.index}" for layer in network.storing for kind in ("k", "v"))


def slm_encodings(
    network: SlmNetwork, ranges: Ranges, margin: float, kv_margin: float, mask_value: float
) -> dict[str, Encoding]:
    """Encodings by tensor name; `ranges` must have the names of `kv_range_names` as (-m, m)."""
    wide = {name: (margin * low, margin * high) for name, (low, high) in ranges.items()}
    encodings = {name: encoding_from_range(*bounds, "uint16") for name, bounds in cut_where_flat(wide).items()}
    for layer_type in network.rings:
        encodings[f"cos.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"sin.{layer_type}"] = encoding_from_range(-1.0, 1.0, "uint16")
        encodings[f"mask.{layer_type}"] = encoding_from_range(mask_value, 0.0, "uint16")
    for name in kv_range_names(network):
        grid = symmetric_encoding(kv_margin * ranges[name][1], "uint8")
        encodings[name] = encodings[name.replace("_new", "")] = grid
    return encodings
