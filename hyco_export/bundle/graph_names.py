"""Names of graphs inside context binaries.

The compiler calls a graph by a hash of its file's name; an app that opens the binary by itself looks for a name that
says what the graph is. A binary keeps names as FlatBuffers strings (length, characters, a zero, padding): a shorter one
is written in its place, the rest is filled with zeros, and nothing else moves. QAIRT 2.51 loads such a binary and
computes the same (tests); a version that does not is noticed when the bundle is built, for its golden vectors are run.
"""

import mmap
import shutil
import struct
from pathlib import Path

import onnx

from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph.context_check import check_context, read_context_model

LENGTH = struct.Struct("<I")  # of a FlatBuffers string, before its characters
FOLDERS = (b"", b"PICKLE/256/")  # what a binary writes before a graph's name


def copy_named(context_model: Path, out_dir: Path, spec: GraphSpec, target: Target) -> tuple[str, str]:
    """Copy an EPContext pair to `out_dir`/NAME.onnx and NAME.bin, the graph called NAME = `spec.name` in both.

    Returns:
        The graph's name in the binary that was copied, and the build id of what compiled it.

    Raises:
        CompileError: the binary does not hold the name, or the copy is not what was copied.
    """
    source = read_context_model(context_model)
    model, binary = out_dir / f"{spec.name}.onnx", out_dir / f"{spec.name}.bin"
    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(context_model.with_name(source.binary), binary)
    if _rename(binary, source.graph.encode(), spec.name.encode()) == 0:
        raise CompileError(f"{source.binary} does not hold the name of its graph", "compile it again")
    pair = onnx.load(context_model, load_external_data=False)
    (node,) = pair.graph.node
    node.name = spec.name
    texts = {"ep_cache_context": binary.name, "partition_name": spec.name}
    for attribute in node.attribute:
        if attribute.name in texts:
            attribute.s = texts[attribute.name].encode()
    onnx.save(pair, model)
    _, info = check_context([model], [spec], target)
    return source.graph, info.build_id


def _rename(binary: Path, old: bytes, new: bytes) -> int:
    """Write `new` in place of every FlatBuffers string `old`; how many there were."""
    count = 0
    with binary.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        for folder in FOLDERS:
            long, short = folder + old, folder + new
            stored = LENGTH.pack(len(long)) + long
            place = data.find(stored)
            while place >= 0:
                data[place : place + len(stored)] = (LENGTH.pack(len(short)) + short).ljust(len(stored), b"\0")
                count += 1
                place = data.find(stored, place)
    return count
