"""Reads a Hexagon context binary's description of itself: target, build, graphs, inputs and outputs.

`read_context` asks a worker process, since a damaged file can crash the reader. The ctypes structures are the memory
layout of what `libQnnSystem.so` returns (QAIRT 2.51, system API 1.15, x86-64). `graph.context_check` judges what is
read.
"""

import ctypes as c
import mmap
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.errors import CompileError
from hyco_export.graph.qnn_process import ContextInfo, GraphInfo, InspectJob, Worker

READING_LIMIT_S = 60.0  # a binary of 1 GB is described in seconds
BINARY_INFO_VERSION = 3
GRAPH_INFO_VERSION = 3
SYSTEM_FUNCTIONS = 4  # create, getBinaryInfo, getMetaData, free
CREATE, GET_BINARY_INFO, FREE = 0, 1, 3

# 32-bit words of a graph's own blob
SPILL_FILL_WORD = 2  # a 64-bit number
VTCM_WORD = 4
OPTIMISATION_WORD = 5
GRAPH_BLOB_BYTES = 4 * (OPTIMISATION_WORD + 1)

QUANTISATION_DEFINED = 1
SCALE_OFFSET_ENCODING = 0

SOC_NOTE = re.compile(rb"soc_type=(\w+);arch=(\d+)")  # the compiler's own note in the file

# Qnn_DataType_t: plain and fixed-point types of a graph's inputs and outputs
DTYPE_NAMES = {
    0x0008: "int8",
    0x0016: "int16",
    0x0032: "int32",
    0x0064: "int64",
    0x0108: "uint8",
    0x0116: "uint16",
    0x0132: "uint32",
    0x0216: "float16",
    0x0232: "float32",
    0x0304: "int4",
    0x0308: "int8",
    0x0316: "int16",
    0x0332: "int32",
    0x0404: "uint4",
    0x0408: "uint8",
    0x0416: "uint16",
    0x0432: "uint32",
    0x0508: "bool",
}


class Provider(c.Structure):
    """One entry of QnnSystemInterface_getProviders: a header, then the function table."""

    _fields_ = [
        ("backend_id", c.c_uint32),
        ("name", c.c_char_p),
        ("version", c.c_uint32 * 3),
        ("functions", c.c_void_p * SYSTEM_FUNCTIONS),
    ]


class QuantParams(c.Structure):
    """Per-tensor scale and offset; other encodings use the same 32 bytes for pointers."""

    _fields_ = [
        ("defined", c.c_uint32),
        ("encoding", c.c_uint32),
        ("scale", c.c_float),
        ("offset", c.c_int32),  # = -zero_point
        ("other", c.c_uint64 * 3),
    ]


class Tensor(c.Structure):
    """One input or output: 144 bytes, whichever version."""

    _fields_ = [
        ("version", c.c_uint32),
        ("id", c.c_uint64),  # 32 bits, then padding before the pointer
        ("name", c.c_char_p),
        ("type", c.c_uint32),
        ("format", c.c_uint32),
        ("dtype", c.c_uint32),
        ("quantisation", QuantParams),
        ("rank", c.c_uint32),
        ("dims", c.POINTER(c.c_uint32)),
        ("memory_type", c.c_uint32),
        ("data", c.c_void_p),
        ("data_bytes", c.c_uint32),
        ("is_dynamic", c.c_void_p),
        ("sparse", c.c_uint32 * 3),
        ("is_produced", c.c_uint8),
    ]


class Graph(c.Structure):
    """One graph of a binary: 88 bytes."""

    _fields_ = [
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("input_count", c.c_uint32),
        ("inputs", c.POINTER(Tensor)),
        ("output_count", c.c_uint32),
        ("outputs", c.POINTER(Tensor)),
        ("updatable_count", c.c_uint32),
        ("updatables", c.POINTER(Tensor)),
        ("blob_bytes", c.c_uint32),
        ("blob", c.POINTER(c.c_uint32)),
        ("reserved", c.c_void_p),
    ]


class ContextBlob(c.Structure):
    """The HTP's own part of a binary's description."""

    _fields_ = [("version", c.c_uint32), ("htp_arch", c.c_uint32)]


class BinaryInfoBody(c.Structure):
    """Version 3 of a binary's description."""

    _fields_ = [
        ("backend_id", c.c_uint32),  # 6 = HTP
        ("build_id", c.c_char_p),
        ("core_api", c.c_uint32 * 3),
        ("backend_api", c.c_uint32 * 3),
        ("soc_version", c.c_char_p),
        ("blob_version", c.c_uint32 * 3),
        ("blob_bytes", c.c_uint64),
        ("context_tensor_count", c.c_uint32),
        ("context_tensors", c.POINTER(Tensor)),
        ("graph_count", c.c_uint32),
        ("graphs", c.POINTER(Graph)),
        ("reserved", c.c_void_p),
        ("context_blob_bytes", c.c_uint32),
        ("context_blob", c.POINTER(ContextBlob)),
        ("soc_model", c.c_uint32),
    ]


class BinaryInfo(c.Structure):
    """A binary's description: the version says what follows."""

    _fields_ = [("version", c.c_uint32), ("body", BinaryInfoBody)]


CreateFunction = c.CFUNCTYPE(c.c_uint64, c.POINTER(c.c_void_p))
BinaryInfoFunction = c.CFUNCTYPE(
    c.c_uint64, c.c_void_p, c.c_void_p, c.c_uint64, c.POINTER(c.POINTER(BinaryInfo)), c.POINTER(c.c_uint64)
)
FreeFunction = c.CFUNCTYPE(c.c_uint64, c.c_void_p)


def read_context(binary: Path) -> ContextInfo:
    """The description of the context binary at `binary`, read in a worker process.

    Raises:
        CompileError: the file is missing, damaged, not a context binary or of a layout this version cannot read.
    """
    if not binary.is_file():
        raise CompileError(f"context binary {binary} does not exist", "compile it again: hyco-export compile")
    with Worker(log=None) as worker:
        deadline = threading.Timer(READING_LIMIT_S, worker.kill)  # a hostile file may never finish being read
        deadline.start()
        try:
            return worker.ask(InspectJob(str(binary)), ContextInfo, subject=binary.name)
        finally:
            deadline.cancel()


def parse_context(binary: Path, system_library: Path) -> ContextInfo:
    """The description of a context binary, read in this process.

    Raises:
        CompileError: the library does not recognise the file, or answers in another
    """
    with _mapped(binary) as data, _binary_info(data, system_library) as info:
        if info.version != BINARY_INFO_VERSION:
            raise CompileError(
                f"the system library describes binaries in layout {info.version}, this version reads "
                f"{BINARY_INFO_VERSION}",
                "use the onnxruntime-qnn version of constraints.txt",
            )
        return _context_info(info.body, _soc_note(data))


@contextmanager
def _mapped(binary: Path) -> Iterator[mmap.mmap]:
    """Map the file: binaries reach a gigabyte."""
    with binary.open("rb") as file:
        if not binary.stat().st_size:
            raise CompileError(f"context binary {binary.name} is empty", "compile it again: hyco-export compile")
        # private and writable: ctypes only points into writable memory
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            yield data


@contextmanager
def _binary_info(data: mmap.mmap, system_library: Path) -> Iterator[BinaryInfo]:
    """The library's description of `data`, valid until the block ends."""
    functions = _system_functions(system_library)
    handle = c.c_void_p()
    _require_ok(CreateFunction(functions[CREATE])(c.byref(handle)), "create a system context")
    start = c.c_char.from_buffer(data)
    info = c.POINTER(BinaryInfo)()
    info_bytes = c.c_uint64()
    get_info = BinaryInfoFunction(functions[GET_BINARY_INFO])
    try:
        status = get_info(handle, c.addressof(start), len(data), c.byref(info), c.byref(info_bytes))
        _require_ok(status, "read the file as a context binary")
        yield info.contents
    finally:
        FreeFunction(functions[FREE])(handle)
        del start  # or the map cannot be closed


def _system_functions(system_library: Path) -> tuple[int, ...]:
    """Addresses of the library's functions, in the order of its interface; 0 for those that it lacks."""
    providers = c.POINTER(c.POINTER(Provider))()
    count = c.c_uint32()
    library = c.CDLL(str(system_library))
    _require_ok(library.QnnSystemInterface_getProviders(c.byref(providers), c.byref(count)), "list system providers")
    return tuple(address or 0 for address in providers[0][0].functions)


def _require_ok(status: int, action: str) -> None:
    if status:
        raise CompileError(
            f"the vendor's system library could not {action} (code {status:#x})",
            "the file is damaged or not a context binary: compile it again",
        )


def _soc_note(data: mmap.mmap) -> str | None:
    """The SoC's name in the compiler's own note, a second source beside the numeric model."""
    match = SOC_NOTE.search(data)
    return match.group(1).decode() if match else None


def _context_info(body: BinaryInfoBody, soc: str | None) -> ContextInfo:
    return ContextInfo(
        backend_id=body.backend_id,
        build_id=body.build_id.decode(),
        htp_arch=body.context_blob.contents.htp_arch,
        soc_model=body.soc_model,
        soc=soc,
        graphs=tuple(_graph_info(body.graphs[i]) for i in range(body.graph_count)),
    )


def _graph_info(graph: Graph) -> GraphInfo:
    if graph.version != GRAPH_INFO_VERSION or graph.blob_bytes < GRAPH_BLOB_BYTES:
        raise CompileError(
            f"graph description of version {graph.version} with {graph.blob_bytes} B, this version reads "
            f"{GRAPH_INFO_VERSION}",
            "use the onnxruntime-qnn version of constraints.txt",
        )
    spill_low, spill_high = graph.blob[SPILL_FILL_WORD], graph.blob[SPILL_FILL_WORD + 1]
    return GraphInfo(
        spec=GraphSpec(
            name=graph.name.decode(),
            inputs=tuple(_tensor_spec(graph.inputs[i]) for i in range(graph.input_count)),
            outputs=tuple(_tensor_spec(graph.outputs[i]) for i in range(graph.output_count)),
        ),
        spill_fill_bytes=spill_low | spill_high << 32,
        vtcm_bytes=graph.blob[VTCM_WORD],
        optimisation_level=graph.blob[OPTIMISATION_WORD],
    )


def _tensor_spec(tensor: Tensor) -> TensorSpec:
    dtype = DTYPE_NAMES.get(tensor.dtype, f"{tensor.dtype:#06x}")
    quantisation = tensor.quantisation
    encoded = quantisation.defined == QUANTISATION_DEFINED and quantisation.encoding == SCALE_OFFSET_ENCODING
    return TensorSpec(
        name=tensor.name.decode(),
        shape=tuple(tensor.dims[i] for i in range(tensor.rank)),
        dtype=dtype,
        encoding=Encoding(dtype, quantisation.scale, -quantisation.offset) if encoded else None,  # type: ignore[arg-type]
    )
