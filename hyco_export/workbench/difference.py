"""How two files, artifacts or folders differ in what matters: facts, tensors with their encodings, weights by layer."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hyco_export.core.artifact import MANIFEST_NAME, file_digest, verify
from hyco_export.core.numerics import decibels
from hyco_export.errors import FormatError, HycoError
from hyco_export.workbench.facts import FileFacts, Stored, TensorFacts, chunks
from hyco_export.workbench.files import read_file

LAYER = re.compile(r"(.*?[A-Za-z_]+[./]\d+)(?:[./].*)?")
OTHERS = "others"
RUN_DEPENDENT = ("wall_s", "peak_rss_bytes", "children_rss_bytes", "total_rss_bytes", "files", "metrics")


class Change(msgspec.Struct, frozen=True):
    """One value on both sides; None where a side has none."""

    name: str
    left: Any
    right: Any


class WeightChange(msgspec.Struct, frozen=True):
    """Values of one tensor: the share that differs, and the right side's SQNR in dB against the left side's.

    sqnr_db is None where values are NaN or infinite.
    """

    name: str
    differing_share: float
    sqnr_db: float | None


class LayerChange(msgspec.Struct, frozen=True):
    """The weights of one layer."""

    layer: str
    tensors: int
    changed: int
    worst: str
    worst_db: float | None
    differing_share: float  # of the worst


class FileDifference(msgspec.Struct, frozen=True):
    """Two files of one name or place. `note` says why they were not compared further."""

    name: str
    kind: str
    facts: tuple[Change, ...] = ()
    tensors: tuple[Change, ...] = ()
    layers: tuple[LayerChange, ...] = ()
    weights: tuple[WeightChange, ...] = ()
    note: str = ""

    @property
    def equal(self) -> bool:
        return not (self.facts or self.tensors or self.layers or self.note)


class Difference(msgspec.Struct, frozen=True):
    """Two files or folders; equal files are only counted."""

    left: str
    right: str
    equal_files: int
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    files: tuple[FileDifference, ...]

    @property
    def equal(self) -> bool:
        return not (self.only_left or self.only_right or self.files)


def compare_paths(left: Path, right: Path) -> Difference:
    """Two files, or two folders file by file; artifacts are checked against their manifests first.

    Raises:
        HycoError: one is a file and the other a folder, or a file is of no kind that is known.
        FormatError: a file is damaged.
        ArtifactError: an artifact is not what its manifest says.
    """
    for path in (left, right):
        if not path.exists():
            raise HycoError(f"{path} does not exist", "give two files, two artifacts or two run folders")
    if left.is_dir() != right.is_dir():
        raise HycoError(f"{left} and {right} are a folder and a file", "give two of one kind")
    if not left.is_dir():
        same = left.stat().st_size == right.stat().st_size and file_digest(left) == file_digest(right)
        changed_file = () if same else (compare_files(left, right, left.name),)
        return Difference(str(left), str(right), int(same), (), (), changed_file)
    here, there = _digests(left), _digests(right)
    common = sorted(here.keys() & there.keys())
    changed = [name for name in common if here[name] != there[name]]
    files = tuple(_compared(left / name, right / name, name) for name in changed)
    differing = tuple(file for file in files if not file.equal)
    only_left, only_right = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    equal = len(common) - len(differing)
    return Difference(str(left), str(right), equal, tuple(only_left), tuple(only_right), differing)


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of a folder's files by their paths in it; of artifacts those of their manifests, which are checked."""
    found: dict[str, str] = {}
    manifests = sorted(folder.rglob(MANIFEST_NAME))
    for path in manifests:
        place = path.parent.relative_to(folder)
        records = verify(path.parent).files
        found |= {str(place / name): record.sha256 for name, record in records.items()}
        found[str(place / MANIFEST_NAME)] = file_digest(path)
    artifacts = {path.parent for path in manifests}
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and not artifacts & set(path.parents):
            found[str(path.relative_to(folder))] = file_digest(path)
    return found


def _compared(left: Path, right: Path, name: str) -> FileDifference:
    """As `compare_files`; a file that is of no known kind, or damaged, has a note."""
    try:
        return compare_files(left, right, name)
    except FormatError as error:
        return FileDifference(name, "damaged", note=error.message)
    except HycoError:
        return FileDifference(name, left.suffix.removeprefix(".") or "file", note="bytes differ")


def compare_files(left: Path, right: Path, name: str) -> FileDifference:
    """Two files with different bytes.

    Raises:
        HycoError, FormatError: see `files.read_file`.
    """
    here, there = read_file(left), read_file(right)
    if here.kind != there.kind:
        return FileDifference(name, here.kind, note=f"a file of kind {here.kind} and one of kind {there.kind}")
    dependent = RUN_DEPENDENT if left.name == MANIFEST_NAME else ()
    facts = _changes(_lasting(here.facts, dependent), _lasting(there.facts, dependent))
    values, weights = _value_changes(here, there)
    tensors = (*_changes(_described(here), _described(there)), *values)
    note = ""
    if not (facts or tensors or weights) and not dependent and here.kind in ("context binary", "zip", "pyz"):
        note = "the description is the same, bytes differ"
    return FileDifference(name, here.kind, facts, tensors, _layers(here, weights), tuple(weights), note)


def _lasting(facts: Mapping[str, Any], dependent: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if re.split(r"[.\[]", name)[0] not in dependent}


def _described(file: FileFacts) -> dict[str, str]:
    """What a tensor is, as a line; its bits by the tensor's role and name."""
    return {f"{tensor.role} {tensor.name}": described(tensor) for tensor in file.tensors}


def described(tensor: TensorFacts) -> str:
    """Type, shape and encoding, e.g. `uint8 [1, 128] scale 0.05 zero point 127`."""
    shape = ", ".join("?" if dim < 0 else str(dim) for dim in tensor.shape)
    return f"{tensor.dtype} [{shape}] {tensor.encoding}".rstrip()


def _changes(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Change, ...]:
    names = [*left, *(name for name in right if name not in left)]
    pairs = ((name, left.get(name), right.get(name)) for name in names)
    return tuple(Change(name, old, new) for name, old, new in pairs if old != new or (name in left) != (name in right))


def _value_changes(left: FileFacts, right: FileFacts) -> tuple[list[Change], list[WeightChange]]:
    """Of the tensors that both sides have in one type and shape: single numbers (scales, zero points), and weights."""
    there = {tensor.name: tensor for tensor in right.tensors if tensor.name in right.stored}
    numbers, weights = [], []
    for tensor in left.tensors:
        name, other = tensor.name, there.get(tensor.name)
        if other is None or name not in left.stored or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            continue
        places = left.stored[name], right.stored[name]
        if prod(tensor.shape) == 1:
            old, new = (float(np.concatenate(list(chunks(place, tensor.dtype)))[0]) for place in places)
            numbers += [Change(name, old, new)] if old != new else []
        else:
            change = _weight_change(name, tensor.dtype, *places)
            weights += [change] if change else []
    return numbers, weights


def _weight_change(name: str, dtype: str, left: Stored, right: Stored) -> WeightChange | None:
    """None where all values are the same; scales and zero points are tensors of their own."""
    signal = noise = 0.0
    count = differing = 0
    if left.stop - left.start != right.stop - right.start:
        return WeightChange(name, 1.0, None)
    for old, new in zip(chunks(left, dtype), chunks(right, dtype), strict=True):
        differing += int(np.count_nonzero(~((old == new) | (np.isnan(old) & np.isnan(new)))))
        count += len(old)
        with np.errstate(all="ignore"):
            signal += float(np.sum(old**2))
            noise += float(np.sum((old - new) ** 2))
    if not differing:
        return None
    finite = np.isfinite(signal) and np.isfinite(noise)
    return WeightChange(name, differing / count, decibels(signal, noise) if finite else None)


def _layers(left: FileFacts, weights: Sequence[WeightChange]) -> tuple[LayerChange, ...]:
    """In the file's order, which is the layers' order in graphs."""
    members: dict[str, int] = defaultdict(int)
    for tensor in left.tensors:
        if tensor.role in ("weight", "stored"):
            members[layer_of(tensor.name)] += 1
    changed: dict[str, list[WeightChange]] = defaultdict(list)
    for change in weights:
        changed[layer_of(change.name)].append(change)
    found = []
    for layer, changes in changed.items():
        worst = min(changes, key=lambda change: -np.inf if change.sqnr_db is None else change.sqnr_db)
        found.append(LayerChange(layer, members[layer], len(changes), worst.name, worst.sqnr_db, worst.differing_share))
    return tuple(sorted(found, key=lambda change: _natural(change.layer)))


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up_proj`; tensors without a number belong to the others."""
    match = LAYER.fullmatch(name)
    return match[1] if match else OTHERS


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
