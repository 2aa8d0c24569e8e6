"""Stage `compile`: Hexagon context binaries of the head (if the recipe has one) and of the SLM's two graphs.

Files (ONNX Runtime EPContext pairs, not Genie bundles):
    head_ctx.onnx, slm_tree_ctx.onnx, slm_prefill_ctx.onnx   one EPContext node each, naming its binary
    *_ctx_qnn.bin                                            what the NPU loads
    slm_*_shared_ctx.onnx, slm_tree_shared_ctx_qnn.bin       both SLM graphs in one binary, if the recipe asks for it
    contexts.json                                            what each binary says of itself: target, build, interface
    parity.json                                              HTP (emulated on x86) against the QDQ graph, by output

Gates: the graph's interface is the one its JSON promises; the graph breaks no rule of the NPU; the pair is what was
asked for (`graph.context_check`); the compiled graph computes what the QDQ graph does (`graph.parity`). The shared
binary is only read back: x86 cannot load it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

import msgspec
import onnx

from hyco_export.core.artifact import HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE, file_digest
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    HEAD_SPEC_FILE,
    SLM_PREFILL_GRAPH,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSession,
    GraphSpec,
    HeadSpec,
    SlmSpec,
    read_spec,
)
from hyco_export.core.files import write_json
from hyco_export.core.golden import read_samples
from hyco_export.core.memory import release_freed
from hyco_export.core.network.weight_files import WEIGHTS_FILE, linears_of_width
from hyco_export.core.numerics import BYTES_PER_MB
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError, GateError
from hyco_export.graph.context_check import require_io_spec
from hyco_export.graph.index import GraphIndex
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import OutputParity, ParityLimits, ParityReport, ReferenceSession, compare_sessions
from hyco_export.graph.qnn import CompiledContext, compile_context, open_context, two_bit_backend
from hyco_export.graph.qnn_process import TwoBit
from hyco_export.graph.smaller_binaries import SharedContext, compile_shared
from hyco_export.models.slm.static_pass import open_torch_slm
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.table import CompileConfig

# How much of a compiled graph the x86 emulator can afford to compare.


TILE_ROWS = 32  # rows that cost what one row costs
WEIGHTS_PER_S = 8_000_000  # 7-11 million on two cores
BUDGET_S = 120  # for the feeds of one graph, one feed at least: a draft of a full-size head takes this long


def affordable_feeds(model: onnx.ModelProto, most: int) -> int:
    """Feeds of this graph that fit the budget: at least one, at most `most` (0 stays 0)."""
    feeds = BUDGET_S * WEIGHTS_PER_S // max(1, linear_work(model))
    return min(most, max(1, feeds))


def linear_work(model: onnx.ModelProto) -> int:
    """Weights that one run reads: those of every linear layer, once for each tile of its rows and each time it runs."""
    index = GraphIndex(model)
    work = 0
    for node in index.nodes:
        weight = index.stored(node.input[1]) if node.op_type == "Gemm" else None
        shape = index.shape(node.output[0])  # [R, N]
        if weight is not None and weight in index.constants and shape is not None:
            work += prod(index.constants[weight].dims) * ceil((shape[0] or 1) / TILE_ROWS)
    return work


CONTEXTS_FILE, PARITY_FILE = "contexts.json", "parity.json"
LOG_FILE = "compile.log"  # beside the artifact, not in it: it holds times
NARROW_BITS = 2  # of weights that the binary can store in less than their INT4 carrier
SLM_GRAPHS = (SLM_TREE_GRAPH, SLM_PREFILL_GRAPH)  # layers of the head have the same names
SHARED = "slm_shared"  # its entry in contexts.json and in the metrics


@dataclass(frozen=True)
class Job:
    """One graph to compile: where it and its sample feeds lie, and what its JSON promises."""

    model: Path
    samples: Path
    spec: GraphSpec
    float_session: GraphSession | None  # the float network with the same integers in and out


@dataclass(frozen=True)
class Reading:
    """What compiling needs to know of a graph: its 2-bit weights, and how many feeds the emulator can afford."""

    two_bit: TwoBit | None
    feeds: int


def build(config: CompileConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Compile, check, compare; see the module for files and gates."""
    contexts: dict[str, CompiledContext] = {}
    reports: dict[str, ParityReport] = {}
    jobs = _jobs(inputs)
    log = out_dir.parent / LOG_FILE
    two_bit = _two_bit(inputs[SLM] / WEIGHTS_FILE, progress) if config.gates.two_bit_weights else None
    for done, job in enumerate(jobs):
        name = job.spec.name
        progress.step("graphs compiled and compared", done, len(jobs))
        reading = _read(job, two_bit if name in SLM_GRAPHS else None, config.gates.emulated_feeds)
        release_freed()  # of what was read, and of the graph before on the CPU: the compiler's process needs the memory
        contexts[name] = compile_context(job.model, out_dir, name, config.target, log, reading.two_bit)
        if reading.feeds:
            reports[name] = _compare(job, contexts[name], config, reading.feeds, log)
            _require_parity(reports[name])
    progress.step("graphs compiled and compared", len(jobs), len(jobs))
    infos = {name: context.info for name, context in contexts.items()}
    shared = _share(inputs[SLM], out_dir, config.target, log, two_bit) if config.gates.shared_binary else None
    if shared:
        infos[SHARED] = shared.info
    write_json(out_dir / CONTEXTS_FILE, infos)
    write_json(out_dir / PARITY_FILE, reports)
    return {
        "target": f"{config.target.name}: {config.target.marketing_name}, Hexagon v{config.target.htp_arch}",
        "compiler": config.compiler,
        "graphs": {name: _metrics(context, reports.get(name)) for name, context in contexts.items()},
        **({SHARED: _shared_metrics(shared, contexts)} if shared else {}),
    }


def _jobs(inputs: Mapping[str, Path]) -> list[Job]:
    """The graphs of the converted artifacts, the head first.

    Raises:
        ArtifactError: a file of the converted artifacts is missing or damaged.
    """
    heads = [_head_job(inputs[HEAD])] if HEAD in inputs else []
    return [*heads, *_slm_jobs(inputs[SLM])]


def _head_job(folder: Path) -> Job:
    head = read_spec(folder / HEAD_SPEC_FILE, HeadSpec)
    return Job(folder / f"{HEAD_GRAPH}.onnx", folder / HEAD_SAMPLES_FILE, head.graph, None)


def _slm_jobs(slm_folder: Path) -> list[Job]:

    slm = read_spec(slm_folder / SLM_SPEC_FILE, SlmSpec)
    floats = open_torch_slm(slm_folder)
    slm_samples = slm_folder / SLM_SAMPLES_FILE
    return [
        Job(slm_folder / f"{SLM_TREE_GRAPH}.onnx", slm_samples, slm.tree, floats.tree),
        Job(slm_folder / f"{SLM_PREFILL_GRAPH}.onnx", slm_samples, slm.prefill, floats.prefill),
    ]


def _two_bit(weights: Path, progress: Progress) -> TwoBit | None:
    """The SLM's 2-bit weights and the backend that stores them so; None, and a note, where it cannot be built."""
    try:
        return TwoBit(str(two_bit_backend()), linears_of_width(weights, NARROW_BITS))
    except CompileError as error:
        progress.note(f"2-bit weights take 4 bits in the binary: {error}")
        return None


def _read(job: Job, two_bit: TwoBit | None, most_feeds: int) -> Reading:
    """Check one graph, and take from it what is needed, so that it does not stay in memory while it is compiled.

    Raises:
        CompileError: the graph is not the one its JSON promises, or breaks a rule.
    """
    model = onnx.load(job.model, load_external_data=False)
    require_io_spec(read_io_spec(model, job.spec.name), job.spec, job.model.name)
    require_clean(model, job.model.name, job.model.parent)
    return Reading(_held_by(model, two_bit), affordable_feeds(model, most_feeds))


def _held_by(model: onnx.ModelProto, two_bit: TwoBit | None) -> TwoBit | None:
    """The 2-bit weights that this graph has."""
    stored = {tensor.name for tensor in model.graph.initializer}
    names = tuple(name for name in two_bit.names if name in stored) if two_bit else ()
    return msgspec.structs.replace(two_bit, names=names) if two_bit and names else None


def _share(slm: Path, out_dir: Path, target: Target, log: Path, two_bit: TwoBit | None) -> SharedContext:
    """Both SLM graphs, which passed on their own, in one binary."""
    models = [slm / f"{name}.onnx" for name in SLM_GRAPHS]
    return compile_shared(models, out_dir, SLM_GRAPHS, target, log, two_bit)


def _compare(job: Job, context: CompiledContext, config: CompileConfig, count: int, log: Path) -> ParityReport:
    """Run the first `count` sample feeds through the binary and the QDQ graph on the CPU."""
    gates = config.gates
    limits = ParityLimits(gates.output_range_share, gates.max_outside_share, gates.min_id_agreement)
    feeds = read_samples(job.samples)[job.spec.name][:count]
    with open_context(context.context_model, config.target, log) as compiled:
        return compare_sessions(ReferenceSession(job.model), compiled, job.spec, feeds, limits, job.float_session)


def _require_parity(report: ParityReport) -> None:
    """Let only a binary through that computes its graph.

    Raises:
        GateError: names the first output outside the limits.
    """
    for output in report.outputs:
        if not output.passed:
            raise GateError(
                f"{report.graph}: output {output.name} of the compiled graph is not the QDQ graph's: "
                f"{output.outside_share:.2%} of its elements are outside the limits (SQNR {output.sqnr_db:.1f} dB, "
                f"largest difference {output.range_share:.2%} of the range)",
                "look for a layer with wide activations (sqnr.json), or widen $.compile in the recipe knowingly",
            )


def _metrics(context: CompiledContext, report: ParityReport | None) -> Metrics:
    (graph,) = context.info.graphs
    return {
        "binary_mb": round(context.binary_bytes / BYTES_PER_MB, 3),
        "sha256": file_digest(context.binary),
        "htp_arch": context.info.htp_arch,
        "soc_model": context.info.soc_model,
        "optimisation_level": graph.optimisation_level,
        "spill_fill_bytes": graph.spill_fill_bytes,
        **({"two_bit_weights": context.two_bit_weights} if context.two_bit_weights else {}),
        "compile_s": round(context.wall_s, 2),
        "compile_cpu_s": round(context.cpu_s, 2),
        "peak_rss_mb": round(context.peak_rss_bytes / BYTES_PER_MB),
        "feeds": report.runs if report else 0,
        "parity": {output.name: _parity_metrics(output) for output in report.outputs} if report else "not emulated",
    }


def _shared_metrics(shared: SharedContext, contexts: Mapping[str, CompiledContext]) -> Metrics:
    separate_bytes = sum(contexts[name].binary_bytes for name in SLM_GRAPHS)
    return {
        "binary_mb": round(shared.binary_bytes / BYTES_PER_MB, 3),
        "separate_mb": round(separate_bytes / BYTES_PER_MB, 3),
        "saved_mb": round((separate_bytes - shared.binary_bytes) / BYTES_PER_MB, 3),
        "sha256": file_digest(shared.binary),
        "compile_s": round(shared.wall_s, 2),
        "peak_rss_mb": round(shared.peak_rss_bytes / BYTES_PER_MB),
        "validated": "read back only: x86 cannot load it",
    }


def _parity_metrics(output: OutputParity) -> Metrics:
    """Ids: the share of equal ones. Real outputs: dB against the QDQ graph, and of both against float."""
    if output.max_steps is None:
        return {"equal_share": round(output.equal_share, 4)}
    figures = {
        "sqnr_db": output.sqnr_db,
        "float_sqnr_db": output.float_sqnr_db,
        "qdq_float_sqnr_db": output.reference_float_sqnr_db,
    }
    return {
        **{name: round(figure, 1) for name, figure in figures.items() if figure is not None},
        "outside_share": round(output.outside_share, 6),
    }
