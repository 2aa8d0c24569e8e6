"""Signed integers of 2, 4 and 8 bits in bytes, as transformers' Gemma quantizer stores them. Values only.

A byte holds 8 // bits values, the first in its lowest bits, each shifted to be unsigned (value + 2^(bits-1)); 8-bit
values are int8 as they are. Rows are packed on their own: a row of odd length ends with a partly used byte.
"""

import numpy as np

WIDTHS = (2, 4, 8)


def packed_width(width: int, bits: int) -> int:
    """Bytes of a row of `width` values."""
    per_byte = 8 // bits
    return (width + per_byte - 1) // per_byte


def pack_rows(integers: np.ndarray, bits: int) -> np.ndarray:
    """int8 [..., width] -> uint8 [..., packed_width]; 8 bits: int8 as they are."""
    if bits == 8:
        return integers.astype(np.int8)
    per_byte, width = 8 // bits, integers.shape[-1]
    padding = packed_width(width, bits) * per_byte - width
    unsigned = (integers.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    unsigned = np.pad(unsigned, [(0, 0)] * (integers.ndim - 1) + [(0, padding)])
    parts = unsigned.reshape(*integers.shape[:-1], -1, per_byte)  # [..., bytes, values of a byte]
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(per_byte):
        packed |= parts[..., place] << (place * bits)
    return packed


def unpack_rows(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """uint8 [..., packed_width] -> int8 [..., width]; 8 bits: int8 as they are."""
    if bits == 8:
        return packed.view(np.int8)[..., :width]
    values = np.empty((*packed.shape, 8 // bits), np.uint8)  # filled in place: matrices have up to 400 million values
    for place in range(8 // bits):
        np.right_shift(packed, place * bits, out=values[..., place])
    values &= 2**bits - 1
    signed = values.view(np.int8)
    signed -= 2 ** (bits - 1)
    return signed.reshape(*packed.shape[:-1], -1)[..., :width]
