"""Tensors in files that travel to a device and back: inputs, qnn-net-run's input lists, and outputs in any layout.

A raw file holds a tensor's elements in row-major order, little-endian. Of an output `a.b` these files are looked at,
in folders and npz archives alike:

    a.b.raw, a.b_native.raw, a.b.bin        and the same with `_` for every character that is no letter or digit

Outputs are native integers, or float32, which qnn-net-run writes without `--use_native_output_files`; raw ones are
told apart by their size.
"""

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyco_export.core.device_spec import TensorSpec

FLOAT, WIDEST = np.dtype("<f4"), np.dtype("<f8")  # the second in archives alone
SUFFIXES = (".raw", "_native.raw", ".bin")
ARRAY_HEADER_BYTES = 10_000  # of an array in an archive, at most: numpy's own limit


class Read(NamedTuple):
    """One tensor as it came back: native integers or floats in its shape, or why there are none."""

    values: np.ndarray | None
    problem: str = ""
    missing: bool = False  # nothing was there, in place of something that cannot be read

    @property
    def floats(self) -> bool:
        return self.values is not None and self.values.dtype.kind == "f"


def write_raw(folder: Path, place: str, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Raw files below `folder`/`place`; paths relative to `folder`, by tensor."""
    (folder / place).mkdir(parents=True, exist_ok=True)
    paths = {name: f"{place}/{name}.raw" for name in arrays}
    for name, values in arrays.items():
        np.ascontiguousarray(values).tofile(folder / paths[name])
    return paths


def input_list(runs: Iterable[Mapping[str, str]]) -> str:
    """What qnn-net-run reads: a line a run, with the paths of its inputs by tensor, relative to where it is started."""
    return "".join(" ".join(f"{name}:={path}" for name, path in run.items()) + "\n" for run in runs)


def read_tensor(places: Iterable[Path], tensor: TensorSpec) -> Read:
    """The tensor of the first of `places` that has it: folders, and npz archives, of which the first must have it."""
    names = tuple(dict.fromkeys((tensor.name, re.sub(r"\W", "_", tensor.name))))
    for place in places:
        if place.suffix == ".npz" and place.is_file():
            return _from_archive(place, names, tensor)
        for path in (place / f"{name}{suffix}" for name in names for suffix in SUFFIXES):
            if path.is_file():
                return _from_raw(path, tensor)
    return Read(None, "missing: the device gave no such output", missing=True)


def to_levels(values: np.ndarray, tensor: TensorSpec) -> np.ndarray:
    """Integers as they are; floats quantised by the tensor's encoding, or rounded where it has none."""
    if values.dtype.kind != "f":
        return values
    return np.rint(values).astype(np.int64) if tensor.encoding is None else tensor.encoding.quantize(values)


def _from_archive(path: Path, names: tuple[str, ...], tensor: TensorSpec) -> Read:
    count = int(np.prod(tensor.shape))
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename.removesuffix(".npy"): member.file_size for member in archive.infolist()}
        name = next((name for name in names if name in sizes), None)
        if name is None:
            return Read(None, f"missing: {path.name} has no array {tensor.name}", missing=True)
        if sizes[name] > count * WIDEST.itemsize + ARRAY_HEADER_BYTES:  # before it is unpacked
            return Read(None, f"unreadable: {name} in {path.name} has {sizes[name]:,} B, it is {list(tensor.shape)}")
        with np.load(path) as arrays:
            values = arrays[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        return Read(None, f"unreadable: {path.name}: {error}")
    if values.size != count or values.dtype.kind not in "iuf":
        came = f"{values.dtype} {list(values.shape)}" if values.size == count else str(list(values.shape))
        return Read(None, f"unreadable: {name} came back as {came} in {path.name}, it is {list(tensor.shape)}")
    return Read(values.reshape(tensor.shape))


def _from_raw(path: Path, tensor: TensorSpec) -> Read:
    count, size = int(np.prod(tensor.shape)), path.stat().st_size
    native = np.dtype(tensor.dtype).newbyteorder("<")
    for dtype in (native, FLOAT):
        if size == count * dtype.itemsize:
            return Read(np.fromfile(path, dtype).reshape(tensor.shape))
    wanted = count * native.itemsize
    kind = "truncated" if size < wanted else "too long"
    return Read(None, f"{kind}: {path.name} has {size:,} B of {wanted:,}; copy it from the device again")
