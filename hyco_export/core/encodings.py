"""Quantisation parameters and packed integers: how real values are written as integers, and back. Pure numpy.

One scale and zero point per tensor for activations and K/V (`Encoding`), one symmetric scale per row for embedding
tables (`quantize_rows`), and signed integers of 2, 4 and 8 bits packed in bytes (`pack_rows`). Ranges come from
calibration.
"""

from typing import Literal, NamedTuple

import msgspec
import numpy as np

IntegerDtype = Literal["uint8", "int8", "uint16", "int16"]
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # below it float32 loses bits, and hardware flushes to 0
WIDTHS = (2, 4, 8)


class Encoding(msgspec.Struct, frozen=True):
    """Quantisation parameters of one tensor: real = (integer - zero_point) * scale."""

    dtype: IntegerDtype
    scale: float
    zero_point: int

    def quantize(self, real: np.ndarray) -> np.ndarray:
        """real [...] float -> integers [...] of `dtype`, rounded half to even and clipped to the range of `dtype`."""
        info = np.iinfo(self.dtype)
        levels = np.rint(np.asarray(real, dtype=np.float64) / self.scale) + self.zero_point
        clipped: np.ndarray = np.clip(levels, info.min, info.max)
        return clipped.astype(self.dtype)

    def dequantize(self, integers: np.ndarray) -> np.ndarray:
        """integers [...] -> real [...] float32."""
        return ((integers.astype(np.int64) - self.zero_point) * np.float64(self.scale)).astype(np.float32)


def encoding_from_range(low: float, high: float, dtype: IntegerDtype) -> Encoding:
    """The encoding in `dtype` that covers [low, high], widened to contain 0 so that 0.0 is exact.

    Raises:
        ValueError: the range is not finite.
    """
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError(f"range [{low}, {high}] is not finite")
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    info = np.iinfo(dtype)
    scale = _stored_scale((high - low) / (info.max - info.min))
    zero_point = int(np.clip(round(info.min - low / scale), info.min, info.max))
    return Encoding(dtype, scale, zero_point)


def symmetric_encoding(magnitude: float, dtype: IntegerDtype) -> Encoding:
    """The encoding in `dtype` centred on 0 that covers [-magnitude, magnitude]."""
    info = np.iinfo(dtype)
    zero_point = (int(info.max) + int(info.min) + 1) // 2
    scale = _stored_scale(magnitude / (info.max - zero_point))
    return Encoding(dtype, scale, zero_point)


def _stored_scale(exact: float) -> float:
    """The scale as float32 holds it, never subnormal."""
    return max(float(np.float32(exact)), SMALLEST_SCALE)


def symmetric_limits(bits: int) -> tuple[int, int]:
    """Lowest and highest signed integer of `bits` bits, e.g. 4 -> (-8, 7)."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def packed_width(width: int, bits: int) -> int:
    """Bytes of a row of `width` values."""
    per_byte = 8 // bits
    return (width + per_byte - 1) // per_byte


def pack_rows(integers: np.ndarray, bits: int) -> np.ndarray:
    """int8 [..., width] -> uint8 [..., packed_width], lowest bits first; 8 bits: int8 unchanged.

    The layout of transformers' Gemma quantizer.
    """
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
    """Inverse of `pack_rows`: uint8 [..., packed_width] -> int8 [..., width]; 8 bits: int8 unchanged."""
    if bits == 8:
        return packed.view(np.int8)[..., :width]
    values = np.empty((*packed.shape, 8 // bits), np.uint8)  # filled in place: matrices have up to 400 million values
    for place in range(8 // bits):
        np.right_shift(packed, place * bits, out=values[..., place])
    values &= 2**bits - 1
    signed = values.view(np.int8)
    signed -= 2 ** (bits - 1)
    return signed.reshape(*packed.shape[:-1], -1)[..., :width]


class QuantizedRows(NamedTuple):
    """real = integers * scale: integers int8 [n, H], scale float32 [n]."""

    integers: np.ndarray
    scale: np.ndarray


def quantize_rows(real: np.ndarray) -> QuantizedRows:
    """Symmetric 8 bits with one scale per row of real [n, H]: the largest magnitude of a row becomes 127."""
    _, largest = symmetric_limits(8)
    magnitude = np.abs(real).max(axis=1)
    scale = np.maximum(magnitude / np.float32(largest), np.finfo(np.float32).tiny).astype(np.float32)
    return QuantizedRows(np.rint(real / scale[:, None]).astype(np.int8), scale)
