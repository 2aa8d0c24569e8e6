"""The graphs of a run compiled with another QAIRT version: by another onnxruntime-qnn here, or by AI Hub.

The result is an artifact beside the run's own, `<run>/<compiler>/compile@TARGET`, with the same pairs and names. It is
built again when a graph, the compiler or the target is another; no stage reads it.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.artifact import (
    COMPILE,
    HEAD,
    HEAD_SAMPLES_FILE,
    MANIFEST_NAME,
    SLM,
    SLM_SAMPLES_FILE,
    Manifest,
    artifact_key,
    artifact_name,
    publish,
    read_manifest,
    verify,
)
from hyco_export.core.device_spec import HEAD_SPEC_FILE, SLM_SPEC_FILE, GraphSpec, HeadSpec, SlmSpec, read_spec
from hyco_export.core.files import write_json
from hyco_export.core.golden import read_samples
from hyco_export.core.recipe import CompileGates
from hyco_export.core.targets import Target, find_target
from hyco_export.errors import ArtifactError, GateError
from hyco_export.graph.parity import ParityLimits, ParityReport, ReferenceSession, compare_sessions
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.qnn_process import ContextInfo
from hyco_export.stages.declarations import Progress
from hyco_export.stages.parts.disk_room import full_disk_named
from hyco_export.stages.run_folder import RunFolder

REVISION = 1
CONTEXTS_FILE, PARITY_FILE, LOG_FILE = "contexts.json", "parity.json", "compile.log"
EMULATED_FEEDS = 2  # of a graph: a QAIRT version either computes a graph or does not


@dataclass(frozen=True)
class GraphToCompile:
    """One integer graph of a run, its inputs and outputs, and where sample feeds lie."""

    model: Path
    spec: GraphSpec
    samples: Path


class Compiled(msgspec.Struct, frozen=True):
    """What the binary says of itself, and how the emulator agrees with the graph, where it was asked."""

    info: ContextInfo
    parity: ParityReport | None = None


Compile = Callable[[GraphToCompile, Target, Path], Compiled]
"""Graph, target, folder for the pair."""


class Compiler(msgspec.Struct, frozen=True):
    """Another compiler. `name`: of its folder in the run; `facts`: what the bytes depend on."""

    name: str
    facts: Mapping[str, str]


class _Config(msgspec.Struct, frozen=True):
    compiler: Mapping[str, str]
    target: Target


def graphs_of(run: RunFolder) -> list[GraphToCompile]:
    """The graphs of a run, the head first.

    Raises:
        ArtifactError: a converted artifact is missing or damaged.
    """
    found, root = [], run.root
    if run.recipe.models.head is not None:
        verify(root / HEAD)
        head = read_spec(root / HEAD / HEAD_SPEC_FILE, HeadSpec)
        found.append(
            GraphToCompile(root / HEAD / f"{head.graph.name}.onnx", head.graph, root / HEAD / HEAD_SAMPLES_FILE)
        )
    verify(root / SLM)
    slm = read_spec(root / SLM / SLM_SPEC_FILE, SlmSpec)
    samples = root / SLM / SLM_SAMPLES_FILE
    return [*found, *(GraphToCompile(root / SLM / f"{one.name}.onnx", one, samples) for one in (slm.tree, slm.prefill))]


def folder_of(run: RunFolder, compiler: Compiler) -> Path:
    """Where the artifact lies."""
    return run.root / compiler.name / artifact_name(COMPILE, find_target(run.recipe.target).name)


def compile_elsewhere(run: RunFolder, compiler: Compiler, compile_one: Compile, progress: Progress) -> Path:
    """Compile all graphs of the run, or find them compiled; the artifact's folder.

    Raises:
        ArtifactError: a converted artifact is missing or damaged.
        HycoError: whatever `compile_one` raises; nothing half-written stays.
    """
    folder, target = folder_of(run, compiler), find_target(run.recipe.target)
    graphs = graphs_of(run)
    inputs = {path.name: read_manifest(path).key for path in dict.fromkeys(graph.model.parent for graph in graphs)}
    config = _Config(dict(compiler.facts), target)
    key = artifact_key(COMPILE, REVISION, config, inputs, {})
    if (folder / MANIFEST_NAME).is_file() and verify(folder).key == key:
        progress.note(f"fresh, reused: {folder}")
        return folder
    build = folder.with_name(f".{folder.name}.build")
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    try:
        done: dict[str, Compiled] = {}
        for number, graph in enumerate(graphs):
            progress.step("graphs compiled", number, len(graphs))
            done[graph.spec.name] = compile_one(graph, target, build)
        progress.step("graphs compiled", len(graphs), len(graphs))
        write_json(build / CONTEXTS_FILE, {name: one.info for name, one in done.items()})
        write_json(build / PARITY_FILE, {name: one.parity for name, one in done.items() if one.parity})
        metrics = {"builds": {name: one.info.build_id for name, one in done.items()}}
        settings = msgspec.to_builtins(config)
        manifest = Manifest(COMPILE, REVISION, key, settings, inputs, {}, {}, metrics, dict(compiler.facts), 0.0)
        publish(build, folder, manifest)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder


def with_wheel(wheel: Path, gates: CompileGates) -> Compile:
    """Compiles with the onnxruntime-qnn in the folder `wheel`, and emulates with it."""

    def compile_one(graph: GraphToCompile, target: Target, out_dir: Path) -> Compiled:
        log = out_dir.parent / LOG_FILE
        with full_disk_named(out_dir, graph.model):
            context = compile_context(graph.model, out_dir, graph.spec.name, target, log, wheel=wheel)
        feeds = _feeds(graph)[:EMULATED_FEEDS]
        limits = ParityLimits(gates.output_range_share, gates.max_outside_share, gates.min_id_agreement)
        with open_context(context.context_model, target, log, wheel) as compiled:
            report = compare_sessions(ReferenceSession(graph.model), compiled, graph.spec, feeds, limits)
        for output in report.outputs:
            if not output.passed:
                raise GateError(
                    f"{graph.spec.name}: output {output.name} of the compiled graph is not the integer graph's: "
                    f"{output.outside_share:.2%} of its elements are outside the limits",
                    "see where they part: hyco-export bisect, or take another version",
                )
        return Compiled(context.info, report)

    return compile_one


def _feeds(graph: GraphToCompile) -> list[dict[str, np.ndarray]]:
    feeds = read_samples(graph.samples).get(graph.spec.name)
    if not feeds:
        raise ArtifactError(f"{graph.samples} holds no feeds of {graph.spec.name}", "build it again: hyco-export run")
    return feeds
