"""Reads an ONNX file's graph without its weights, whoever wrote it.

The file is walked in protobuf's wire format first: the large values of weights are left out, what remains is limited,
and only that is decoded by `onnx`. Numbers of messages and fields: onnx.proto.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import numpy_helper

from hyco_export.errors import FormatError
from hyco_export.graph.io_spec import carried
from hyco_export.workbench.facts import BITS, Bytes, FileFacts, Stored, TensorFacts, damaged, require_shape

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
VALUE_FIELDS = frozenset({4, 5, 6, 7, RAW_DATA, 10, 11})  # of TensorProto
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
KEPT_BYTES = 4096  # an initializer up to here is decoded whole: scales, zero points, shapes
LIGHT_LIMIT = 16_000_000  # bytes of a graph without weights: that of a model with 35 layers has 2 million
FIELD_LIMIT = 500_000  # parts of a graph
SHOWN_OPERATORS = 12
Q, DQ = "QuantizeLinear", "DequantizeLinear"
DTYPES = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()} | {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}


class Field(NamedTuple):
    """One field of a message: its own bytes [start, end), its content [inside, end)."""

    number: int
    kind: int
    start: int
    inside: int
    end: int


def read_onnx(data: Bytes) -> FileFacts:
    """Graph, operators, inputs, outputs and weights of an ONNX file.

    Raises:
        FormatError: it is none, is damaged, or has more parts than a graph may have.
    """
    model, places = _light_model(data)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    external = _external(data.path, graph.initializer)
    facts: dict[str, Any] = {
        "graph": graph.name,
        "IR version": model.ir_version,
        "operator sets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "nodes": len(graph.node),
        "operators": dict(Counter(node.op_type for node in graph.node).most_common(SHOWN_OPERATORS)),
        **{prop.key: prop.value for prop in model.metadata_props},
        **_context_facts(graph.node),
    }
    if external:
        facts["weights in"] = sorted({place.path.name for place in external.values()})
    encodings = Encodings(graph, constants)
    tensors = [
        *(
            _value_facts(data.path, v, "input", encodings.read_as(v.name))
            for v in graph.input
            if v.name not in constants
        ),
        *(_value_facts(data.path, v, "output", encodings.written_as(v.name)) for v in graph.output),
        *(_weight_facts(data.path, tensor) for tensor in graph.initializer),
    ]
    stored = {**places, **external}
    known = {tensor.name for tensor in tensors if tensor.dtype in BITS}
    return FileFacts(data.path, "ONNX graph", facts, tuple(tensors), {n: p for n, p in stored.items() if n in known})


def _light_model(data: Bytes) -> tuple[onnx.ModelProto, dict[str, Stored]]:
    """The model without large values, and where those lie by tensor name."""
    walk = _Walk(data)
    light, tensors = bytearray(), []
    for part in walk.fields(0, data.size):
        if (part.number, part.kind) == (GRAPH, LENGTH):
            graph, found = _light_graph(walk, part)
            tensors += found
            light += _framed(GRAPH, graph)
        else:
            light += walk.copy(part)
    try:
        model = onnx.ModelProto.FromString(bytes(light))
    except Exception as error:  # protobuf's DecodeError has no public home
        raise damaged(data.path, "not an ONNX model: its parts cannot be decoded") from error
    if not model.HasField("graph"):
        raise damaged(data.path, "not an ONNX model: it has no graph")
    places = {}
    for number, place in tensors:
        if number < len(model.graph.initializer):
            places[model.graph.initializer[number].name] = place
    return model, places


def _light_graph(walk: "_Walk", graph: Field) -> tuple[bytes, list[tuple[int, Stored]]]:
    light, places, number = bytearray(), [], 0
    for part in walk.fields(graph.inside, graph.end):
        if (part.number, part.kind) != (INITIALIZER, LENGTH):
            light += walk.copy(part)
            continue
        whole, inside = part.end - part.inside <= KEPT_BYTES, bytearray()
        for field in walk.fields(part.inside, part.end):
            if whole or field.number not in VALUE_FIELDS:
                inside += walk.copy(field)
            if (field.number, field.kind) == (RAW_DATA, LENGTH):
                places.append((number, Stored(walk.data.path, field.inside, field.end)))
        light += _framed(INITIALIZER, bytes(inside))
        number += 1
    return bytes(light), places


def _framed(number: int, content: bytes) -> bytes:
    """A field of bytes: key, length, content."""
    return _varint(number << 3 | LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


class _Walk:
    """Fields of messages, counted, and what is copied of them, counted too."""

    def __init__(self, data: Bytes) -> None:
        self.data, self._fields, self._copied = data, 0, 0

    def fields(self, position: int, end: int) -> Iterator[Field]:
        """The fields of the message in bytes [position, end). Raises FormatError: they are none, or too many."""
        while position < end:
            self._fields += 1
            if self._fields > FIELD_LIMIT:
                raise damaged(self.data.path, f"more than {FIELD_LIMIT:,} parts, no graph has so many")
            start = position
            key, position = self._varint(position, end)
            number, kind = key >> 3, key & 7
            if number == 0 or kind not in (VARINT, FIXED64, LENGTH, FIXED32):
                raise damaged(self.data.path, f"not an ONNX model: no field at byte {start:,}")
            inside = position
            if kind == VARINT:
                _, position = self._varint(position, end)
            elif kind == LENGTH:
                length, inside = self._varint(position, end)
                position = inside + length
            else:
                position += 8 if kind == FIXED64 else 4
            if position > end:
                raise damaged(self.data.path, f"the part at byte {start:,} would end at {position:,}, beyond {end:,}")
            yield Field(number, kind, start, inside, position)

    def copy(self, part: Field) -> bytes:
        """A field's bytes. Raises FormatError: too many were copied."""
        self._copied += part.end - part.start
        if self._copied > LIGHT_LIMIT:
            raise damaged(self.data.path, f"more than {LIGHT_LIMIT:,} B beside weights, no graph has so many")
        return self.data.data[part.start : part.end]

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                break
            byte = self.data.data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (2**64 - 1), position
        raise damaged(self.data.path, f"not an ONNX model: no number at byte {position:,}")


def _external(path: Path, tensors: Iterable[onnx.TensorProto]) -> dict[str, Stored]:
    """Places of weights that lie in files beside the model.

    Raises:
        FormatError: a weight points out of the model's folder, or beyond its file's end.
    """
    found = {}
    for tensor in tensors:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = path.parent / entries.get("location", "")
        if not where.resolve().is_relative_to(path.parent.resolve()):
            raise damaged(path, f"weight {tensor.name[:80]!r} points out of the folder: {entries['location'][:80]!r}")
        if not where.is_file():
            continue  # the graph is read all the same
        try:
            offset, size = int(entries.get("offset", 0)), where.stat().st_size
            length = int(entries.get("length", size - offset))
        except ValueError as error:
            raise damaged(path, f"weight {tensor.name[:80]!r} has no readable place in {where.name}") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise damaged(path, f"weight {tensor.name[:80]!r} would end at byte {offset + length:,} of {where.name}")
        found[tensor.name] = Stored(where, offset, offset + length)
    return found


def _context_facts(nodes: Sequence[onnx.NodeProto]) -> dict[str, Any]:
    """What an EPContext node says: the binary, and the version of the vendor's libraries that made it."""
    if len(nodes) != 1 or nodes[0].op_type != "EPContext":
        return {}
    attributes = {attribute.name: attribute for attribute in nodes[0].attribute}
    shown = {"binary": "ep_cache_context", "graph in the binary": "partition_name", "QAIRT": "ep_sdk_version"}
    if "embed_mode" in attributes and attributes["embed_mode"].i == 1:
        shown.pop("binary")  # it is the binary itself
    return {name: attributes[key].s.decode(errors="replace")[:200] for name, key in shown.items() if key in attributes}


def _value_facts(path: Path, value: onnx.ValueInfoProto, role: str, encoding: str) -> TensorFacts:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    dtype = DTYPES.get(kind.elem_type, f"type {kind.elem_type}")
    return TensorFacts(value.name, role, dtype, require_shape(path, value.name, shape), encoding)


def _weight_facts(path: Path, tensor: onnx.TensorProto) -> TensorFacts:
    dtype = DTYPES.get(tensor.data_type, f"type {tensor.data_type}")
    return TensorFacts(tensor.name, "weight", dtype, require_shape(path, tensor.name, tuple(tensor.dims)))


class Encodings:
    """Scale and zero point of a graph's inputs and outputs, found through operators that keep them.

    Iterative, and each tensor is looked at once: a foreign graph may run in circles.
    """

    def __init__(self, graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto]) -> None:
        self._constants = constants
        self._makers = {name: node for node in graph.node for name in node.output}
        self._users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._users[name].append(node)

    def read_as(self, tensor: str) -> str:
        """Of the first DequantizeLinear behind `tensor`."""
        seen, queue = {tensor}, deque([tensor])
        while queue:
            name = queue.popleft()
            for node in self._users[name]:
                if node.op_type == DQ and node.input[0] == name:
                    return self._text(node)
                if name in carried(node):
                    queue += [output for output in node.output if output not in seen]
                    seen |= set(node.output)
        return ""

    def written_as(self, tensor: str) -> str:
        """Of the last QuantizeLinear before `tensor`."""
        seen, queue = {tensor}, deque([tensor])
        while queue:
            node = self._makers.get(queue.popleft())
            if node is not None and node.op_type == Q:
                return self._text(node)
            if node is not None:
                queue += [source for source in carried(node) if source not in seen]
                seen |= set(node.input)
        return ""

    def _text(self, node: onnx.NodeProto) -> str:
        parts = [self._constants[name] for name in node.input[1:3] if name in self._constants]
        try:
            values = [numpy_helper.to_array(part) for part in parts if part.data_location != part.EXTERNAL]
        except Exception as error:  # a foreign tensor may lie about its size in many ways
            raise FormatError(f"node {node.name[:80]!r} has a scale that cannot be read", "do not load it") from error
        if len(values) != 2 or values[0].size != 1 or values[1].size != 1:
            return "per channel" if values and values[0].size > 1 else ""
        return f"scale {float(values[0].item()):.9g} zero point {int(values[1].item())}"
