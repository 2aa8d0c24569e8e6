"""What a file is, by its first bytes and its name, and the reader for it. JSON files count by their leaves."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.errors import HycoError
from hyco_export.workbench.archives import read_zip
from hyco_export.workbench.facts import Bytes, FileFacts, TensorFacts, damaged, opened
from hyco_export.workbench.onnx_file import read_onnx
from hyco_export.workbench.tensor_headers import GGUF_MAGIC, read_gguf, read_safetensors

CONTEXT_MAGIC = bytes([0, 0, 0, 2, 0, 0, 0, 3])  # as QAIRT 2.3x to 2.51 begin a context binary
ZIP_MARKS = (b"PK\x03\x04", b"PK\x05\x06")
JSON_LIMIT = 64_000_000
LEAF_LIMIT = 1_000_000
SHOWN_LEAVES = 40
KNOWN = "ONNX, context binary (.bin), safetensors, GGUF, npz, pyz, JSON"


def read_file(path: Path) -> FileFacts:
    """The facts of any file that this program knows.

    Raises:
        FormatError: it is damaged, hostile, or not what it seems to be.
        HycoError: no file, or of a kind that is not known.
    """
    with opened(path) as data:
        return _reader(data)(data)


def _reader(data: Bytes) -> Callable[[Bytes], FileFacts]:
    """Raises FormatError, HycoError: the name promises another kind, or none is known."""
    first = data.data[:8]
    if first.startswith(GGUF_MAGIC) or data.path.suffix == ".gguf":
        if not first.startswith(GGUF_MAGIC):
            raise damaged(data.path, f"begins with {first[:4]!r}, a GGUF file with {GGUF_MAGIC!r}")
        return read_gguf
    if first.startswith(ZIP_MARKS) or data.path.suffix in (".npz", ".pyz", ".zip") or first.startswith(b"#!"):
        return read_zip
    if first == CONTEXT_MAGIC or data.path.suffix == ".bin":
        return read_binary
    if data.path.suffix == ".safetensors" or (data.data[8:9] == b"{" and data.path.suffix != ".onnx"):
        return read_safetensors
    if data.path.suffix == ".json":
        return read_json
    if data.path.suffix == ".onnx":
        return read_onnx
    raise HycoError(f"{data.path} is of no kind that is known here", f"known: {KNOWN}")


def read_binary(data: Bytes) -> FileFacts:
    """What a context binary says of itself, read by the vendor's library in a process of its own.

    Raises:
        FormatError: it does not begin like one.
        CompileError: the library does not recognise it, or did not survive it.
    """
    from hyco_export.graph.context_binary import read_context

    if data.data[:8] != CONTEXT_MAGIC:
        raise damaged(data.path, f"begins with {data.data[:8].hex()}, a context binary with {CONTEXT_MAGIC.hex()}")
    info = read_context(data.path)
    tensors, levels = [], {}
    for graph in info.graphs:
        levels[graph.spec.name] = graph.optimisation_level
        for role, specs in (("input", graph.spec.inputs), ("output", graph.spec.outputs)):
            for spec in specs:
                encoding = spec.encoding
                text = f"scale {encoding.scale:.9g} zero point {encoding.zero_point}" if encoding else ""
                name = spec.name if len(info.graphs) == 1 else f"{graph.spec.name}/{spec.name}"
                tensors.append(TensorFacts(name, role, spec.dtype, spec.shape, text))
    facts: dict[str, Any] = {
        "target": f"v{info.htp_arch}, SoC model {info.soc_model}" + (f" ({info.soc})" if info.soc else ""),
        "build": info.build_id,
        "optimisation level": levels,
        "spill-fill bytes": {graph.spec.name: graph.spill_fill_bytes for graph in info.graphs},
    }
    return FileFacts(data.path, "context binary", facts, tuple(tensors))


def read_json(data: Bytes) -> FileFacts:
    """Leaves of a JSON file by their paths.

    Raises:
        FormatError: it is no JSON, too large or too deep.
    """
    if data.size > JSON_LIMIT:
        raise damaged(data.path, f"{data.size:,} B of JSON, at most {JSON_LIMIT:,} are read")
    try:
        leaves = _leaves(msgspec.json.decode(data.data[:]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(data.path, f"not JSON ({str(error)[:80]})") from error
    if len(leaves) > LEAF_LIMIT:
        raise damaged(data.path, f"{len(leaves):,} values, at most {LEAF_LIMIT:,} are read")
    return FileFacts(data.path, "JSON", leaves)


def _leaves(content: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stack = [("", content)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{key}".removeprefix("."), part) for key, part in reversed(value.items())]
        elif isinstance(value, list):
            stack += [(f"{path}[{number}]", part) for number, part in reversed(list(enumerate(value)))]
        else:
            found[path] = value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return found
