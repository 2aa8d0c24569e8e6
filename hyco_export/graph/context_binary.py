"""What a Hexagon context binary says about itself: target, build, graphs, inputs and outputs.

`read_context` asks a worker process, since a damaged file can take the process down with it. Knows the vendor's system
library through `graph.context_layout`; does not judge what it reads (`graph.context_check` does).
"""

import ctypes
import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.core.encodings import Encoding
from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.errors import CompileError
from hyco_export.graph import context_layout as layout
from hyco_export.graph.frames import ContextInfo, GraphInfo, InspectJob
from hyco_export.graph.worker import Worker

SOC_NOTE = re.compile(rb"soc_type=(\w+);arch=(\d+)")


def read_context(binary: Path) -> ContextInfo:
    """What the context binary at `binary` says about itself.

    Raises:
        CompileError: the file is missing, damaged, not a context binary or of a layout this version cannot read.
    """
    if not binary.is_file():
        raise CompileError(f"context binary {binary} does not exist", "compile it again: hyco-export compile")
    with Worker(log=None) as worker:
        return worker.ask(InspectJob(str(binary)), ContextInfo, subject=binary.name)


def parse_context(binary: Path, system_library: Path) -> ContextInfo:
    """The same in this process.

    Raises:
        CompileError: the library does not recognise the file, or answers in another layout.
    """
    with _mapped(binary) as data, _binary_info(data, system_library) as info:
        if info.version != layout.BINARY_INFO_VERSION:
            raise CompileError(
                f"the system library describes binaries in layout {info.version}, this version reads "
                f"{layout.BINARY_INFO_VERSION}",
                "use the onnxruntime-qnn version of constraints.txt",
            )
        return _context_info(info.body, _soc_note(data))


@contextmanager
def _mapped(binary: Path) -> Iterator[mmap.mmap]:
    """The file in memory without reading it whole: binaries reach a gigabyte."""
    with binary.open("rb") as file:
        if not binary.stat().st_size:
            raise CompileError(f"context binary {binary.name} is empty", "compile it again: hyco-export compile")
        # private and writable: ctypes only points into writable memory
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            yield data


@contextmanager
def _binary_info(data: mmap.mmap, system_library: Path) -> Iterator[layout.BinaryInfo]:
    """The library's description of `data`, valid until the block ends."""
    functions = _system_functions(system_library)
    handle = ctypes.c_void_p()
    _require_ok(layout.CreateFunction(functions[layout.CREATE])(ctypes.byref(handle)), "create a system context")
    start = ctypes.c_char.from_buffer(data)
    info = ctypes.POINTER(layout.BinaryInfo)()
    info_bytes = ctypes.c_uint64()
    get_info = layout.BinaryInfoFunction(functions[layout.GET_BINARY_INFO])
    try:
        status = get_info(handle, ctypes.addressof(start), len(data), ctypes.byref(info), ctypes.byref(info_bytes))
        _require_ok(status, "read the file as a context binary")
        yield info.contents
    finally:
        layout.FreeFunction(functions[layout.FREE])(handle)
        del start  # or the map cannot be closed


def _system_functions(system_library: Path) -> ctypes.Array:
    providers = ctypes.POINTER(ctypes.POINTER(layout.Provider))()
    count = ctypes.c_uint32()
    library = ctypes.CDLL(str(system_library))
    _require_ok(
        library.QnnSystemInterface_getProviders(ctypes.byref(providers), ctypes.byref(count)), "list system providers"
    )
    return providers[0][0].functions


def _require_ok(status: int, action: str) -> None:
    if status:
        raise CompileError(
            f"the vendor's system library could not {action} (code {status:#x})",
            "the file is damaged or not a context binary: compile it again",
        )


def _soc_note(data: mmap.mmap) -> str | None:
    """The SoC's name in the compiler's own note, a second witness beside the numeric model."""
    match = SOC_NOTE.search(data)
    return match.group(1).decode() if match else None


def _context_info(body: layout.BinaryInfoBody, soc: str | None) -> ContextInfo:
    return ContextInfo(
        backend_id=body.backend_id,
        build_id=body.build_id.decode(),
        htp_arch=body.context_blob.contents.htp_arch,
        soc_model=body.soc_model,
        soc=soc,
        graphs=tuple(_graph_info(body.graphs[i]) for i in range(body.graph_count)),
    )


def _graph_info(graph: layout.Graph) -> GraphInfo:
    if graph.version != layout.GRAPH_INFO_VERSION or graph.blob_bytes < layout.GRAPH_BLOB_BYTES:
        raise CompileError(
            f"graph description of version {graph.version} with {graph.blob_bytes} B, this version reads "
            f"{layout.GRAPH_INFO_VERSION}",
            "use the onnxruntime-qnn version of constraints.txt",
        )
    spill_low, spill_high = graph.blob[layout.SPILL_FILL_WORD], graph.blob[layout.SPILL_FILL_WORD + 1]
    return GraphInfo(
        spec=GraphSpec(
            name=graph.name.decode(),
            inputs=tuple(_tensor_spec(graph.inputs[i]) for i in range(graph.input_count)),
            outputs=tuple(_tensor_spec(graph.outputs[i]) for i in range(graph.output_count)),
        ),
        spill_fill_bytes=spill_low | spill_high << 32,
        vtcm_bytes=graph.blob[layout.VTCM_WORD],
        optimisation_level=graph.blob[layout.OPTIMISATION_WORD],
    )


def _tensor_spec(tensor: layout.Tensor) -> TensorSpec:
    dtype = layout.DTYPE_NAMES.get(tensor.dtype, f"{tensor.dtype:#06x}")
    quantisation = tensor.quantisation
    encoded = (
        quantisation.defined == layout.QUANTISATION_DEFINED and quantisation.encoding == layout.SCALE_OFFSET_ENCODING
    )
    return TensorSpec(
        name=tensor.name.decode(),
        shape=tuple(tensor.dims[i] for i in range(tensor.rank)),
        dtype=dtype,
        encoding=Encoding(dtype, quantisation.scale, -quantisation.offset) if encoded else None,  # type: ignore[arg-type]
    )
