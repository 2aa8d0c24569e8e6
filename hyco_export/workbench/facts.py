"""What `inspect` knows of a file: its kind, facts by name, and its tensors with their stored values.

Files may come from anybody. Readers look at headers alone, through `Bytes`, which refuses places outside the file; what
they count is limited, so that a hostile file is refused at once.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hyco_export.errors import FormatError, HycoError

CHUNK_VALUES = 4_000_000  # compared at a time: 32 MB as float64
LARGEST_RANK, LARGEST_DIM = 16, 2**40
DAMAGED_HINT = "fetch or copy it again; if it came from elsewhere, do not load it"
BITS = {  # of one stored value
    **{"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "bool": 8, "int8": 8, "uint8": 8, "float8": 8},
    **{"int16": 16, "uint16": 16, "float16": 16, "bfloat16": 16, "int32": 32, "uint32": 32, "float32": 32},
    **{"int64": 64, "uint64": 64, "float64": 64},
}


def damaged(path: Path, what: str) -> FormatError:
    """The refusal of a file; `what` says the value and the rule it breaks."""
    return FormatError(f"{path}: {what}", DAMAGED_HINT)


class Stored(NamedTuple):
    """Where a tensor's values lie: bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int


class TensorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor. `role`: input, output, weight or stored. `shape`: an unknown dimension is -1."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str = ""  # scale and zero point

    @property
    def size_bytes(self) -> int:
        return (prod(self.shape) * BITS.get(self.dtype, 0) + 7) // 8 if min(self.shape, default=0) >= 0 else 0


@dataclass(frozen=True)
class FileFacts:
    """A file as far as it was read. `stored`: places of values by tensor name, of those that can be compared."""

    path: Path
    kind: str
    facts: dict[str, Any]
    tensors: tuple[TensorFacts, ...] = ()  # those with a place in `stored` have a type of BITS
    stored: dict[str, Stored] = field(default_factory=dict)


class Bytes:
    """A file's bytes, with bounds."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)

    def take(self, start: int, length: int, what: str) -> bytes:
        """Raises FormatError: a part of them is beyond the file's end."""
        if length < 0 or start < 0 or start + length > self.size:
            raise damaged(self.path, f"{what} would end at byte {start + length:,}, the file has {self.size:,}")
        return self.data[start : start + length]

    def number(self, form: str, start: int, what: str) -> Any:
        """One number in `struct`'s form, e.g. `<Q`. Raises FormatError: it is beyond the file's end."""
        return struct.unpack(form, self.take(start, struct.calcsize(form), what))[0]


@contextmanager
def opened(path: Path) -> Iterator[Bytes]:
    """Map a file.

    Raises:
        FormatError: it is empty, or no regular file (a pipe or device would be waited for).
    """
    if not path.is_file():
        raise HycoError(f"{path} is no file", "give a regular file or an artifact folder")
    if not path.stat().st_size:
        raise damaged(path, "the file is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield Bytes(path, data)


def require_shape(path: Path, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that a tensor can have; dimensions of -1 are unknown ones.

    Raises:
        FormatError: too many dimensions, or one that is negative or absurd.
    """
    if len(shape) > LARGEST_RANK or any(not -1 <= dim <= LARGEST_DIM for dim in shape):
        raise damaged(path, f"tensor {name[:80]!r} has the shape {list(shape)[:8]}")
    return shape


def chunks(place: Stored, dtype: str) -> Iterator[np.ndarray]:
    """Stored values as float64 [n], a chunk at a time. Sub-byte integers are packed, lowest bits first."""
    step = CHUNK_VALUES * BITS[dtype] // 8
    with place.path.open("rb") as file:
        file.seek(place.start)
        for start in range(place.start, place.stop, step):
            yield _values(file.read(min(step, place.stop - start)), dtype)


def _values(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if BITS[dtype] < 8:
        return _unpacked(np.frombuffer(data, np.uint8), BITS[dtype], dtype.startswith("int")).astype(np.float64)
    kind = "uint8" if dtype in ("bool", "float8") else dtype
    return np.frombuffer(data, np.dtype(kind)).astype(np.float64)


def _unpacked(packed: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    places = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    values = np.stack(places, axis=1).ravel().astype(np.int16)
    return np.where(values >= 2 ** (bits - 1), values - 2**bits, values) if signed else values
