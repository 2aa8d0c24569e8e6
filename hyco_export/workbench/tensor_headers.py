"""Reads the headers of safetensors and GGUF files: which tensors they hold, of which type and shape, and where.

Layouts: the safetensors format (a length, JSON, data) and ggml's gguf.md (keys and values, then tensors).
"""

import struct
from math import prod
from typing import Any

import msgspec
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hyco_export.workbench.facts import BITS, Bytes, FileFacts, Stored, TensorFacts, damaged, require_shape

LENGTH_BYTES = 8
HEADER_LIMIT = 16_000_000  # bytes of JSON; a model with 35 layers has a tenth of a million
TENSOR_LIMIT, KEY_LIMIT = 100_000, 10_000
ELEMENT_LIMIT = 1_000_000  # array elements that are walked one by one: texts of vocabularies and merges
SHOWN_CHARS, SHOWN_KEYS = 80, 60
STORED_NAMES = {
    **{"BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32"},
    **{"I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8", "F8_E5M2": "float8"},
}
GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
FIXED = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<B",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
COMPARABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


class Entry(msgspec.Struct, frozen=True):
    """One tensor in the JSON of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors(data: Bytes) -> FileFacts:
    """Tensors and metadata of a safetensors file.

    Raises:
        FormatError: the header is too long or no JSON, or a tensor's bytes are not where and as many as it says.
    """
    length = data.number("<Q", 0, "the header's length")
    if length > HEADER_LIMIT:
        raise damaged(data.path, f"a header of {length:,} B, at most {HEADER_LIMIT:,} are read")
    header = data.take(LENGTH_BYTES, length, "the header")
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(part, type=Entry) for name, part in parts.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(
            data.path, f"its header is not that of a safetensors file ({str(error)[:SHOWN_CHARS]})"
        ) from error
    start = LENGTH_BYTES + length
    tensors, stored = [], {}
    for name, entry in entries.items():
        shape = require_shape(data.path, name, entry.shape)
        dtype = STORED_NAMES.get(entry.dtype, entry.dtype[:SHOWN_CHARS])
        first, last = (start + offset for offset in entry.data_offsets)
        if min(shape, default=0) < 0 or not start <= first <= last <= data.size:
            raise damaged(
                data.path, f"tensor {name[:SHOWN_CHARS]!r} lies at bytes {first:,} to {last:,} of {data.size:,}"
            )
        if dtype in BITS and prod(shape) * BITS[dtype] // 8 != last - first:
            raise damaged(
                data.path, f"tensor {name[:SHOWN_CHARS]!r} has {last - first:,} B for {dtype} {list(shape)[:8]}"
            )
        tensors.append(TensorFacts(name, "stored", dtype, shape))
        if dtype in BITS:
            stored[name] = Stored(data.path, first, last)
    facts = {f"metadata {key[:SHOWN_CHARS]}": value[:SHOWN_CHARS] for key, value in list(metadata.items())[:SHOWN_KEYS]}
    return FileFacts(data.path, "safetensors", facts, tuple(tensors), stored)


class _GgufReader:
    """Keys, values and tensor descriptions, one after the other."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.position, self._walked = data, len(GGUF_MAGIC), 0

    def number(self, form: str, what: str) -> Any:
        value = self.data.number(form, self.position, what)
        self.position += struct.calcsize(form)
        return value

    def count(self, limit: int, what: str) -> int:
        number = self.number("<Q", f"the number of {what}")
        if number > limit:
            raise damaged(self.data.path, f"{number:,} {what}, at most {limit:,} are read")
        return int(number)

    def text(self, what: str) -> str:
        return bytes(self._text_bytes(what)).decode("utf-8", errors="replace")

    def _text_bytes(self, what: str) -> bytes:
        length = self.number("<Q", f"the length of {what}")
        found = self.data.take(self.position, length, what)
        self.position += length
        return found

    def value(self, kind: int, key: str) -> Any:
        """A value to show: a number, the beginning of a text, or what an array is."""
        what = f"the value of {key[:SHOWN_CHARS]}"
        if kind in FIXED:
            return self.number(FIXED[GGUFValueType(kind)], what)
        if kind == GGUFValueType.STRING:
            return self.text(what)[:SHOWN_CHARS]
        if kind != GGUFValueType.ARRAY:
            raise damaged(self.data.path, f"{what} is of type {kind}, which GGUF does not have")
        inner, length = self.number("<I", what), self.number("<Q", what)
        if inner in FIXED:
            width = struct.calcsize(FIXED[GGUFValueType(inner)])
            self.data.take(self.position, min(length, 1) * width, what)
            if length * width > self.data.size - self.position:
                raise damaged(self.data.path, f"{what} is an array of {length:,}, more than the file has bytes for")
            self.position += length * width
        elif inner == GGUFValueType.STRING:
            self._walked += length
            if self._walked > ELEMENT_LIMIT:
                raise damaged(
                    self.data.path, f"{what} brings its texts to {self._walked:,}, the limit is {ELEMENT_LIMIT:,}"
                )
            for _ in range(length):
                self.skip_text(what)
        else:
            raise damaged(self.data.path, f"{what} is an array of type {inner}, which is not read")
        return f"{length:,} values"

    def skip_text(self, what: str) -> None:
        """Past one text of an array."""
        self.position += LENGTH_BYTES + self.data.number("<Q", self.position, what)
        if self.position > self.data.size:
            raise damaged(self.data.path, f"{what} ends beyond the file")


def read_gguf(data: Bytes) -> FileFacts:
    """Keys, values and tensors of a GGUF file.

    Raises:
        FormatError: another version or byte order, counts beyond all models, or a part beyond the file's end.
    """
    reader = _GgufReader(data)
    version = reader.number("<I", "the version")
    if version not in GGUF_VERSIONS:
        raise damaged(data.path, f"GGUF version {version}, versions {GGUF_VERSIONS} in little-endian order are read")
    tensor_count, key_count = reader.count(TENSOR_LIMIT, "tensors"), reader.count(KEY_LIMIT, "keys")
    facts: dict[str, Any] = {"version": version, "keys": key_count}
    alignment = DEFAULT_ALIGNMENT
    for _ in range(key_count):
        key = reader.text("a key")
        value = reader.value(reader.number("<I", f"the type of {key[:SHOWN_CHARS]}"), key)
        if key == ALIGNMENT_KEY and isinstance(value, int) and value > 0:
            alignment = value
        if len(facts) < SHOWN_KEYS:
            facts[key[:SHOWN_CHARS]] = value
    described = [_gguf_tensor(reader) for _ in range(tensor_count)]
    start = -(-reader.position // alignment) * alignment
    tensors, stored = [], {}
    for tensor, kind, offset in described:
        tensors.append(tensor)
        size = _gguf_bytes(kind, prod(tensor.shape))
        if start + offset + size > data.size:
            raise damaged(
                data.path, f"tensor {tensor.name[:SHOWN_CHARS]!r} would end beyond the file's {data.size:,} B"
            )
        if kind.name in COMPARABLE:
            stored[tensor.name] = Stored(data.path, start + offset, start + offset + size)
    return FileFacts(data.path, "GGUF", facts, tuple(tensors), stored)


def _gguf_tensor(reader: _GgufReader) -> tuple[TensorFacts, GGMLQuantizationType, int]:
    """Name, type, shape (outermost first, as elsewhere) and offset."""
    name = reader.text("a tensor's name")
    rank = reader.number("<I", f"the rank of {name[:SHOWN_CHARS]}")
    require_shape(reader.data.path, name, (1,) * min(rank, 1000))
    shape = tuple(reader.number("<Q", f"the shape of {name[:SHOWN_CHARS]}") for _ in range(rank))
    require_shape(reader.data.path, name, shape)
    number = reader.number("<I", f"the type of {name[:SHOWN_CHARS]}")
    offset = reader.number("<Q", f"the place of {name[:SHOWN_CHARS]}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise damaged(reader.data.path, f"tensor {name[:SHOWN_CHARS]!r} is of the unknown type {number}") from error
    return TensorFacts(name, "stored", COMPARABLE.get(kind.name, kind.name), shape[::-1]), kind, offset


def _gguf_bytes(kind: GGMLQuantizationType, values: int) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return -(-values // block) * size
