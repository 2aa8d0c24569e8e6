"""What a process and its compiler worker say to each other: MessagePack values, each after its length.

Knows the messages and how they cross a pipe. Carries arrays as dtype, shape and bytes; nothing that runs on decoding.
"""

from collections.abc import Mapping
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target

LENGTH_BYTES = 8  # little-endian, before every message
Message = TypeVar("Message")


class TwoBit(msgspec.Struct, frozen=True):
    """Weights to store in 2 bits: a backend built for it (`graph.two_bit_backend`) and the tensors' names."""

    library: str
    names: tuple[str, ...]


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """Compile `model` into `context_model` and the binary beside it."""

    model: str
    context_model: str
    target: Target
    explain_fallback: bool = False  # let nodes fall back to the CPU and have the provider log why
    two_bit: TwoBit | None = None


class SharedCompileJob(msgspec.Struct, frozen=True, tag=True):
    """Compile `models` into one binary beside the first of `context_models`."""

    models: tuple[str, ...]
    context_models: tuple[str, ...]
    target: Target
    two_bit: TwoBit | None = None


class OpenJob(msgspec.Struct, frozen=True, tag=True):
    """Load a context binary and keep it ready."""

    context_model: str
    target: Target


class InspectJob(msgspec.Struct, frozen=True, tag=True):
    """Read what a context binary says about itself."""

    binary: str


class Array(msgspec.Struct, frozen=True, array_like=True):
    """One array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Run the open graph once."""

    feeds: dict[str, Array]


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A finished compilation."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    two_bit_weights: int = 0  # stored in 2 bits


class Opened(msgspec.Struct, frozen=True, tag=True):
    """An open graph: its inputs and outputs (no encodings: the caller's spec has them)."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class GraphInfo(msgspec.Struct, frozen=True):
    """One graph of a context binary."""

    spec: GraphSpec
    spill_fill_bytes: int
    vtcm_bytes: int
    optimisation_level: int  # htp_graph_finalization_optimization_mode; 0 = the compiler's default


class ContextInfo(msgspec.Struct, frozen=True, tag=True):
    """What a context binary says about itself."""

    backend_id: int  # 6 = HTP
    build_id: str
    htp_arch: int
    soc_model: int
    soc: str | None  # the vendor's name, from the compiler's own note in the file
    graphs: tuple[GraphInfo, ...]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one run gave."""

    arrays: dict[str, Array]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job that raised; the worker lives on. `hint`: the next step, where the error named one itself, else None."""

    error: str
    hint: str | None = None


Job = CompileJob | SharedCompileJob | OpenJob | InspectJob | RunJob
Reply = Compiled | Opened | ContextInfo | Outputs | Failed


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Arrays by name -> what crosses the pipe."""
    return {name: Array(array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def unpack_arrays(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays are read-only views of the message."""
    return {name: np.frombuffer(a.data, dtype=a.dtype).reshape(a.shape) for name, a in arrays.items()}


def write_frame(stream: BinaryIO, message: object) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH_BYTES, "little"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO, kind: type[Message]) -> Message | None:
    """Receive one message of `kind`, or None when the other side is gone."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
