"""What came back from a device: outputs of a bundle's golden vectors, read in the layouts that tools write.

For a vector `CASE` of graph `GRAPH`, the n-th line of `qnn-net-run/GRAPH.txt` (from 0), a tensor is looked for in

    OUTPUTS/CASE.npz, OUTPUTS/GRAPH/CASE.npz          arrays by tensor name
    OUTPUTS/CASE/, OUTPUTS/GRAPH/CASE/                TENSOR.raw
    OUTPUTS/GRAPH/Result_n/                           TENSOR.raw or TENSOR_native.raw, as qnn-net-run writes them

where `.` in a tensor's name may also be `_`. Raw files hold native integers; float32 ones, which qnn-net-run writes
without `--use_native_output_files`, are known by their size and quantised again.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyco_export.bundle.spec import Bundle, Case, Tensor
from hyco_export.errors import ArtifactError

FLOAT_BYTES = 4
SUFFIXES = (".raw", "_native.raw", ".bin")


class Read(NamedTuple):
    """One tensor of one vector: its integers, or why there are none; `floats`: it came as float32."""

    levels: np.ndarray | None
    problem: str = ""
    floats: bool = False


def read_outputs(bundle: Bundle, folder: Path) -> dict[tuple[str, str], Read]:
    """By case and tensor; graphs of which nothing came back are left out.

    Raises:
        ArtifactError: no such folder, or nothing in it is an output of this bundle.
    """
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", "give the folder that holds what came back from the device")
    found: dict[tuple[str, str], Read] = {}
    for name, graph in bundle.graphs.items():
        cases = [case for case in bundle.cases if case.graph == name]
        if not any(place.exists() for number, case in enumerate(cases) for place in _places(folder, case, number)):
            continue
        for number, case in enumerate(cases):
            for tensor in graph.outputs:
                found[case.id, tensor.name] = _read(folder, case, number, tensor)
    if not found:
        raise ArtifactError(
            f"{folder} holds no outputs of this bundle's golden vectors",
            "its layout is one of those in BUNDLE.md, chapter 12, such as head/Result_0/chain.raw",
        )
    return found


def _places(folder: Path, case: Case, number: int) -> Iterator[Path]:
    yield folder / f"{case.id}.npz"
    yield folder / case.graph / f"{case.id}.npz"
    yield folder / case.id
    yield folder / case.graph / case.id
    yield folder / case.graph / f"Result_{number}"


def _read(folder: Path, case: Case, number: int, tensor: Tensor) -> Read:
    names = dict.fromkeys((tensor.name, re.sub(r"\W", "_", tensor.name)))
    for place in _places(folder, case, number):
        if place.suffix == ".npz" and place.is_file():
            return _from_npz(place, list(names), tensor)
        for path in (place / f"{name}{suffix}" for name in names for suffix in SUFFIXES):
            if path.is_file():
                return _from_raw(path, tensor)
    return Read(None, "missing: the device gave no such output")


def _from_npz(path: Path, names: list[str], tensor: Tensor) -> Read:
    try:
        with np.load(path) as stored:
            values = next((stored[name] for name in names if name in stored.files), None)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return Read(None, f"unreadable: {path.name}: {error}")
    if values is None:
        return Read(None, f"missing: {path.name} has no array {tensor.name}")
    if values.size != int(np.prod(tensor.shape)):
        return Read(None, f"unreadable: {list(values.shape)} in {path.name}, expected {list(tensor.shape)}")
    return _levels(values.reshape(tensor.shape), tensor)


def _from_raw(path: Path, tensor: Tensor) -> Read:
    elements, size = int(np.prod(tensor.shape)), path.stat().st_size
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    if size == elements * dtype.itemsize:
        return Read(np.fromfile(path, dtype).reshape(tensor.shape))
    if size == elements * FLOAT_BYTES:
        return _levels(np.fromfile(path, "<f4").reshape(tensor.shape), tensor)
    wanted = elements * dtype.itemsize
    kind = "truncated" if size < wanted else "too long"
    return Read(None, f"{kind}: {path.name} has {size} of {wanted} B; copy it from the device again")


def _levels(values: np.ndarray, tensor: Tensor) -> Read:
    if values.dtype.kind != "f":
        return Read(values)
    encoding = tensor.spec.encoding
    return Read(np.rint(values).astype(np.int64) if encoding is None else encoding.quantize(values), floats=True)
