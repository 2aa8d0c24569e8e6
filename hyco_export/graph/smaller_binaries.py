"""Smaller context binaries: weights stored in 2 bits, and several graphs that share their weights in one binary.

The backend that stores named weights in 2 bits (`two_bit_backend.c`) is built on first use with the system's C compiler
into the user's cache folder, beside links to the vendor's libraries (never copies); the folder's name is a hash of the
source and of the vendor's version and place, so that an upgrade builds anew. Only the worker process loads it.
"""

import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import platformdirs

from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph import qnn_process
from hyco_export.graph.context_check import check_context
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.qnn_process import ContextInfo, Worker

SOURCE = Path(__file__).with_name("two_bit_backend.c")
LIBRARY = "libhyco_two_bit.so"
VENDOR_LIBRARIES = ("libQnnHtp.so", "libHtpPrepare.so", "libQnnSystem.so")  # looked for beside the backend
KEY_LENGTH = 16  # hexadecimal digits
SHOWN_CHARS = 300  # of a compiler's message
SUFFIX = "shared"  # in the file names of a shared binary


def find_compiler() -> str | None:
    """The C compiler's command: $CC, the one Python was built with, or `cc`; None where none is installed."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        if command and shutil.which(shlex.split(command)[0]):
            return command
    return None


def backend_folder(vendor: Path, vendor_version: str, cache: Path | None = None) -> Path:
    """Where the backend for this vendor library lies, or will."""
    known = b"\0".join([SOURCE.read_bytes(), vendor_version.encode(), str(vendor.resolve()).encode()])
    root = cache or platformdirs.user_cache_path("hyco-export")
    return root / "two-bit-backend" / hashlib.sha256(known).hexdigest()[:KEY_LENGTH]


def build_backend(vendor: Path, vendor_version: str, cache: Path | None = None) -> Path:
    """The backend's library, built if it is not there yet; appears whole or not at all.

    Args:
        vendor: folder of the vendor's libraries.
        vendor_version: part of the folder's name.
        cache: in place of the user's cache folder.

    Raises:
        CompileError: no C compiler, it failed, or the cache folder cannot be written.
    """
    folder = backend_folder(vendor, vendor_version, cache)
    if (folder / LIBRARY).is_file():
        return folder / LIBRARY
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as building:
            made = Path(building) / folder.name
            made.mkdir()
            _compile(made, Path(building))
            for name in VENDOR_LIBRARIES:
                (made / name).symlink_to(vendor.resolve() / name)
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(folder)
    except OSError as error:
        raise CompileError(f"{folder.parent} cannot take the 2-bit backend: {error}", "make it writable") from error
    return folder / LIBRARY


def _compile(folder: Path, scratch: Path) -> None:
    """The shared library in `folder`, through setuptools' compiler classes."""
    import setuptools  # noqa: F401  # gives distutils, which Python 3.12 no longer has

    # isort: split
    from distutils.ccompiler import new_compiler
    from distutils.errors import CCompilerError, DistutilsError

    command = find_compiler()
    if command is None:
        raise CompileError("no C compiler was found ($CC, cc)", "install one, for example gcc")
    compiler = new_compiler()
    compiler.set_executables(compiler_so=f"{command} -fPIC", linker_so=f"{command} -shared")
    try:
        objects = compiler.compile([str(SOURCE)], output_dir=str(scratch), extra_preargs=["-O2"])
        compiler.link_shared_object(objects, LIBRARY, output_dir=str(folder), libraries=["dl"])
    except (CCompilerError, DistutilsError) as error:
        said = " ".join(str(error).split())[:SHOWN_CHARS]
        raise CompileError(f"{command} cannot build {SOURCE.name}: {said}", "try another one: CC=...") from error


class TwoBitNames:
    """The loaded backend's list of weights, in this process; the provider must be pointed at the same file.

    Raises:
        CompileError: it cannot be loaded.
    """

    def __init__(self, library: Path, names: Sequence[str]) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise CompileError(f"the 2-bit backend cannot be loaded: {error}", "delete its folder") from error
        array = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        if self._library.hyco_two_bit_names(array, len(names)):
            raise MemoryError("no memory for the names of 2-bit weights")

    def narrowed(self) -> int:
        """How many weights the backend stored in 2 bits so far."""
        return int(self._library.hyco_two_bit_count())


@dataclass(frozen=True)
class SharedContext:
    """Several compiled graphs in one binary, and what compiling them cost."""

    context_models: tuple[Path, ...]  # <graph>_shared_ctx.onnx, in the order given; all name the one binary
    binary: Path
    info: ContextInfo
    wall_s: float
    peak_rss_bytes: int
    binary_bytes: int


def compile_shared(
    models: Sequence[Path],
    out_dir: Path,
    names: Sequence[str],
    target: Target,
    log: Path,
    two_bit: qnn_process.TwoBit | None = None,
) -> SharedContext:
    """Compile the QDQ graphs `models`, called `names`, into one binary in `out_dir`; common weights are stored once.

    Raises:
        CompileError: the compiler refused a graph, crashed, or made something else than was asked for.
    """
    specs = [_io_spec(model, name) for model, name in zip(models, names, strict=True)]
    context_models = tuple(out_dir / f"{name}_{SUFFIX}_ctx.onnx" for name in names)
    job = qnn_process.SharedCompileJob(
        models=tuple(str(model.resolve()) for model in models),
        context_models=tuple(str(path.resolve()) for path in context_models),
        target=target,
        two_bit=two_bit,
    )
    try:
        with Worker(log) as worker:
            cost = worker.ask(job, qnn_process.Compiled, subject=" and ".join(names))
        binary, info = check_context(context_models, specs, target)
    except BaseException:
        for path in out_dir.glob(f"*_{SUFFIX}_ctx*"):
            path.unlink()
        raise
    return SharedContext(
        context_models, binary, info, cost.wall_s, cost.peak_rss_bytes, binary_bytes=binary.stat().st_size
    )


def _io_spec(model: Path, name: str) -> GraphSpec:
    if not model.is_file():
        raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
    return read_io_spec(onnx.load(model, load_external_data=False), name)
