"""`bundle.json`: what a bundle holds and how a device uses it, as values. BUNDLE.md is written from it.

Paths are relative to the bundle's folder, with `/`. Raw files hold a tensor's elements in row-major order,
little-endian, in the tensor's own integer type.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hyco_export.core.artifact import FileRecord, file_digest
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    SLM_PREFILL_GRAPH,
    SLM_TREE_GRAPH,
    GraphSpec,
    HeadSpec,
    SlmSpec,
    TensorSpec,
)
from hyco_export.core.encodings import Encoding
from hyco_export.core.targets import Target
from hyco_export.errors import ArtifactError
from hyco_export.protocol.wire import Acceptance, Sampling

BUNDLE_FILE = "bundle.json"
FORMAT = 1  # of bundle.json
INTEGER, EMULATOR = "integer graph", "emulator"  # origins of golden outputs
ALTERED = "altered"  # origin of outputs that were changed behind the graph, for branches that no graph takes by itself
GRAPHS = (HEAD_GRAPH, SLM_TREE_GRAPH, SLM_PREFILL_GRAPH)
COPY_AGAIN = "copy the bundle again, or build it: hyco-export bundle"


class Tensor(msgspec.Struct, frozen=True):
    """One input or output: real = (integer - zero_point) * scale; plain integers (ids, rows) have neither."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int, ...]
    scale: float | None
    zero_point: int | None
    row_axis: int | None  # of an output: the axis that counts the rows of a pass
    meaning: str
    handling: str  # of an input: who fills it, and how; of an output: what becomes of it
    tolerance_steps: int | None = None  # of a real output: an element that differs by more from a golden one is off

    @property
    def spec(self) -> TensorSpec:
        encoding = None
        if self.scale is not None and self.zero_point is not None:
            encoding = Encoding(self.dtype, self.scale, self.zero_point)  # type: ignore[arg-type]  # checked when written
        return TensorSpec(self.name, self.shape, self.dtype, encoding)

    def in_use(self, values: np.ndarray, rows: int | None) -> np.ndarray:
        """The part of an output that means something: the first `rows` rows of its pass, the others are padding."""
        if rows is None or self.row_axis is None:
            return values
        return np.take(values, range(rows), axis=self.row_axis)


class Graph(msgspec.Struct, frozen=True):
    """One graph: its EPContext pair, and the integer graph that it was compiled from."""

    model: str  # EPContext model; in its folder lies nothing but it and its binary
    binary: str
    integer_graph: str
    compiled_name: str  # the graph's name in the binary that `compile` made; in this one it is the graph's own
    compiled_sha256: str  # of that binary
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Drafting(msgspec.Struct, frozen=True):
    """How the tree is scored and cut (HyCo, §3.1)."""

    edge_log_prob: float  # ln chain_acceptance
    budget: int
    candidates_per_row: int
    temperature: float
    chain_acceptance: float


class Server(msgspec.Struct, frozen=True):
    """What a server must say of itself, and what the run asked of it."""

    verifier_digest: str
    tokenizer_digest: str
    keepset_digest: str
    head_digest: str
    vocab_size: int
    sampling: Sampling
    acceptance: Acceptance


class Chat(msgspec.Struct, frozen=True):
    """The chat template taken apart: `before` question `after` answer `between` question `after` ..."""

    before: str
    after: str
    between: str


class Tolerance(msgspec.Struct, frozen=True):
    """How far outputs may be from golden ones; see `compare` and `Tensor.tolerance_steps`."""

    range_share: float  # of an output's range over all golden vectors: a smaller difference is never off
    outside_share: float  # of an output's elements that are off, at most
    equal_ids_share: float  # of a graph's ids over all cases, at least


class Toolchain(msgspec.Struct, frozen=True):
    """What compiled the binaries."""

    compiler: str
    qairt: str  # the binaries' own build id


class Case(msgspec.Struct, frozen=True):
    """One golden vector: raw files of all inputs, and of all outputs by origin."""

    id: str
    graph: str
    what: str
    rows: int | None  # of a pass: rows in use, the first ones; what comes out of padding rows means nothing
    inputs: dict[str, str]
    outputs: dict[str, dict[str, str]]


class Exchange(msgspec.Struct, frozen=True):
    """One recorded call: bodies of request and reply as they travel."""

    method: str
    path: str
    request: str
    reply: str


class Session(msgspec.Struct, frozen=True):
    """Whole rounds: the passes (ids of cases, in order) and the calls of one recorded conversation."""

    id: str
    what: str
    calls: tuple[str, ...]
    exchanges: tuple[Exchange, ...]


class Bundle(msgspec.Struct, frozen=True):
    """The whole of it. `head` and `slm` are `HeadSpec` and `SlmSpec` but for their graphs."""

    format: int
    program: str  # that wrote it
    name: str
    key: str  # of what it was made from: equal keys, equal bundles
    target: Target
    toolchain: Toolchain
    graphs: dict[str, Graph]
    head: dict[str, Any]
    slm: dict[str, Any]
    keepset: str
    slm_tables: str
    slm_sink: str  # stored K/V of the opening token; "" without one
    slm_bridge: str  # token bridge of an SLM with a vocabulary of its own; "" where it has the verifier's
    tokenizer: str
    chat_template: str
    chat: Chat
    stop_ids: tuple[int, ...]
    drafting: Drafting
    server: Server
    tolerance: Tolerance
    cases: tuple[Case, ...]
    sessions: tuple[Session, ...]
    host_cases: tuple[Case, ...] = ()  # passes of sessions whose outputs were altered: no graph gives them
    graphs_key: str = ""  # of the integer graphs that the binaries were compiled from (`core.device_profile`)
    files: dict[str, FileRecord] = {}  # every file but this one

    @property
    def head_spec(self) -> HeadSpec:
        return msgspec.convert({**self.head, "graph": self._io(HEAD_GRAPH)}, HeadSpec)

    @property
    def slm_spec(self) -> SlmSpec:
        graphs = {"tree": self._io(SLM_TREE_GRAPH), "prefill": self._io(SLM_PREFILL_GRAPH)}
        return msgspec.convert({**self.slm, **graphs}, SlmSpec)

    def graph_spec(self, name: str) -> GraphSpec:
        """Inputs and outputs of one graph."""
        graph = self.graphs[name]
        return GraphSpec(name, tuple(one.spec for one in graph.inputs), tuple(one.spec for one in graph.outputs))

    def _io(self, name: str) -> Any:
        return msgspec.to_builtins(self.graph_spec(name))


def read_bundle(folder: Path) -> Bundle:
    """The bundle in `folder`, without its files being checked.

    Raises:
        ArtifactError: there is none, or one of another format.
    """
    path = folder / BUNDLE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Bundle)
    except OSError as error:
        raise ArtifactError(f"{folder} holds no bundle (no {BUNDLE_FILE})", COPY_AGAIN) from error
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"{path} is not a bundle of format {FORMAT}: {error}", COPY_AGAIN) from error


def open_bundle(folder: Path, left_out: tuple[str, ...] = ()) -> Bundle:
    """The same after every file was compared with its recorded size and sha256.

    Args:
        left_out: beginnings of paths that are not looked at, such as golden vectors that stayed behind.

    Raises:
        ArtifactError: names the first file that is missing, cut off or altered.
    """
    if sys.byteorder != "little":
        raise ArtifactError("golden files are little-endian, this machine is not", "use another machine")
    bundle = read_bundle(folder)
    for name, record in bundle.files.items():
        path = folder / name
        if name.startswith(left_out):
            continue
        if not path.is_file():
            raise ArtifactError(f"{path} is missing", COPY_AGAIN)
        size = path.stat().st_size
        if size != record.size_bytes:
            raise ArtifactError(f"{path} has {size} B, {record.size_bytes} B were written", COPY_AGAIN)
        if file_digest(path) != record.sha256:
            raise ArtifactError(f"{path} is not the file that was written (sha256 differs)", COPY_AGAIN)
    return bundle


def load_arrays(folder: Path, paths: Mapping[str, str], tensors: Iterable[TensorSpec]) -> dict[str, np.ndarray]:
    """Raw files as arrays, by tensor."""
    return {one.name: np.fromfile(folder / paths[one.name], one.dtype).reshape(one.shape) for one in tensors}
