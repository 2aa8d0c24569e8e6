"""Reads the directories of zip files: npz (arrays), pyz (Python programs) and others. Nothing is unpacked.

A zip bomb is refused by what its directory says: members larger than the limits, or members that share their bytes.
"""

import io
import zipfile
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from hyco_export.workbench.facts import Bytes, FileFacts, Stored, TensorFacts, damaged, require_shape

MEMBER_LIMIT = 20_000
PROGRAM_LIMIT = 500_000_000  # bytes of a program, unpacked: numpy with its libraries has 100 million
RATIO_LIMIT = 200  # of unpacked to packed bytes; text reaches 20, deflate's best is 1,032
SMALL_BYTES = 1_000_000  # below it a high ratio is no bomb
DIRECTORY_LIMIT = 8_000_000  # bytes of the directory
END_BYTES = 22 + 65_535  # the end record with the longest comment
END_MARK = b"PK\x05\x06"
ARRAY_HEADER_LIMIT = 10_000  # numpy's own, in characters
SHEBANG_BYTES = 200


def read_zip(data: Bytes) -> FileFacts:
    """Members of a zip file; of an npz its arrays.

    Raises:
        FormatError: no directory, one that lies, or contents beyond the limits.
    """
    _require_short_directory(data)
    try:
        with data.path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _require_harmless(data, members)
            arrays = [_array(data, archive, member) for member in members if member.filename.endswith(".npy")]
    except (
        zipfile.BadZipFile,
        EOFError,
        OverflowError,
        ValueError,
        RuntimeError,  # a compression or version that zipfile does not know, too
        OSError,
    ) as error:
        raise damaged(data.path, f"not a zip file that can be read ({error})") from error
    names = {member.filename for member in members}
    kind = "npz" if arrays and len(arrays) == len(members) else "pyz" if "__main__.py" in names else "zip"
    facts: dict[str, Any] = {
        "members": len(members),
        "unpacked bytes": sum(member.file_size for member in members),
        "packed bytes": sum(member.compress_size for member in members),
    }
    if kind == "pyz":
        first = data.take(0, min(data.size, SHEBANG_BYTES), "the first line").split(b"\n", 1)[0]
        facts["interpreter"] = first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else "not named"
        facts["packages"] = sorted({PurePosixPath(name).parts[0] for name in names if "/" in name and name.strip("/")})[
            :60
        ]
    found = tuple(tensor for tensor, _ in arrays)
    stored = {tensor.name: place for tensor, place in arrays if place is not None}
    return FileFacts(data.path, kind, facts, found, stored)


def _require_short_directory(data: Bytes) -> None:
    """Before `zipfile` reads all of it. Raises FormatError: there is none, or it is too long."""
    tail = data.take(max(0, data.size - END_BYTES), min(data.size, END_BYTES), "the end record")
    place = tail.rfind(END_MARK)
    if place < 0 or place + 22 > len(tail):
        raise damaged(data.path, "not a zip file: it has no directory")
    length = int.from_bytes(tail[place + 12 : place + 16], "little")
    if DIRECTORY_LIMIT < length < 2**32 - 1 or (data.size > 2**32 and length == 2**32 - 1):
        raise damaged(data.path, f"a directory of {length:,} B, at most {DIRECTORY_LIMIT:,} are read")


def _require_harmless(data: Bytes, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MEMBER_LIMIT:
        raise damaged(data.path, f"{len(members):,} members, at most {MEMBER_LIMIT:,} are read")
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise damaged(data.path, "two members have one name: which of them counts depends on the reader")
    position = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        parts = PurePosixPath(member.filename).parts
        if member.filename.startswith("/") or ".." in parts or "\\" in member.filename:
            raise damaged(data.path, f"member {member.filename[:80]!r} leaves the folder it is unpacked into")
        if member.header_offset < position:
            raise damaged(data.path, f"member {member.filename[:80]!r} shares bytes with another, as zip bombs do")
        position = member.header_offset + member.compress_size
        if position > data.size:
            raise damaged(data.path, f"member {member.filename[:80]!r} would end beyond the file")
        unpacked = member.file_size
        if unpacked > SMALL_BYTES and unpacked > RATIO_LIMIT * max(1, member.compress_size):
            raise damaged(data.path, f"member {member.filename[:80]!r} unpacks to {unpacked:,} B: a zip bomb")
    total = sum(member.file_size for member in members if not member.filename.endswith(".npy"))
    if total > PROGRAM_LIMIT:
        raise damaged(data.path, f"its members unpack to {total:,} B, at most {PROGRAM_LIMIT:,} are expected")


def _array(data: Bytes, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[TensorFacts, Stored | None]:
    """One array by its header; where it is stored unpacked, also the place of its values."""
    with archive.open(member) as file:
        head = io.BytesIO(file.read(ARRAY_HEADER_LIMIT))
    name = member.filename.removesuffix(".npy")
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(head, max_header_size=ARRAY_HEADER_LIMIT)
    if dtype.hasobject:
        raise damaged(data.path, f"array {name[:80]!r} holds Python objects, which run code when they are loaded")
    tensor = TensorFacts(name, "stored", dtype.name, require_shape(data.path, name, shape))
    values = tensor.size_bytes
    if member.compress_type != zipfile.ZIP_STORED or fortran or values + head.tell() != member.file_size:
        return tensor, None
    start = member.header_offset + 30 + sum(data.number("<H", member.header_offset + at, name) for at in (26, 28))
    return tensor, Stored(data.path, start + head.tell(), start + head.tell() + values)
