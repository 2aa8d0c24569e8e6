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

Graph by graph, what would come out the same is taken over from the artifact before (`stages.parts.earlier_graphs`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from pathlib import Path

import msgspec
import onnx

from hyco_export.core.artifact import HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE, content_digest, file_digest
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
from hyco_export.errors import CompileError, GateError
from hyco_export.graph.context_check import require_io_spec
from hyco_export.graph.index import GraphIndex
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import OutputParity, ParityLimits, ParityReport, ReferenceSession, compare_sessions
from hyco_export.graph.qnn import CompiledContext, compile_context, open_context, two_bit_backend
from hyco_export.graph.qnn_process import ContextInfo, TwoBit
from hyco_export.graph.smaller_binaries import SharedContext, compile_shared
from hyco_export.models.slm.static_pass import open_torch_slm
from hyco_export.stages.declarations import PREVIOUS, Metrics, Progress
from hyco_export.stages.parts.disk_room import full_disk_named
from hyco_export.stages.parts.earlier_graphs import (
    COMPARED_BY,
    CONTEXTS_FILE,
    MADE_FROM,
    PARITY_FILE,
    EarlierGraphs,
    compared_by,
    made_from,
)
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


LOG_FILE = "compile.log"  # beside the artifact, not in it: it holds times
NARROW_BITS = 2  # of weights that the binary can store in less than their INT4 carrier
SLM_GRAPHS = (SLM_TREE_GRAPH, SLM_PREFILL_GRAPH)  # layers of the head have the same names
SHARED = "slm_shared"  # its entry in contexts.json and in the metrics
BINARY, COMPILED, TAKEN_OVER = "binary", "compiled", "taken over"  # in a graph's metrics


@dataclass(frozen=True)
class Job:
    """One graph to compile: where it and its sample feeds lie, and what its JSON promises."""

    model: Path
    samples: Path
    spec: GraphSpec
    weights: Path | None = None  # of the float network with the same integers in and out
    open_float: Callable[[], GraphSession] | None = None


@dataclass(frozen=True)
class Reading:
    """What compiling needs to know of a graph: its 2-bit weights, and how many feeds the emulator can afford."""

    two_bit: TwoBit | None
    feeds: int


@dataclass(frozen=True)
class Made:
    """One graph's binary in the artifact: what it says of itself, what is measured, and its comparison."""

    info: ContextInfo
    metrics: Metrics
    report: ParityReport | None = None


@dataclass(frozen=True)
class Workshop:
    """What all graphs of one build share; `digest` reads a file's sha256 once."""

    config: CompileConfig
    earlier: EarlierGraphs
    out_dir: Path
    progress: Progress
    digest: Callable[[Path], str]

    @property
    def log(self) -> Path:
        return self.out_dir.parent / LOG_FILE


def build(config: CompileConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Compile, check, compare; take over what would come out the same. See the module for files and gates."""
    shop = Workshop(config, EarlierGraphs(inputs.get(PREVIOUS)), out_dir, progress, cache(file_digest))
    jobs = _jobs(inputs)
    two_bit = _two_bit(config, inputs[SLM] / WEIGHTS_FILE, progress)
    made: dict[str, Made] = {}
    for done, job in enumerate(jobs):
        progress.step("graphs compiled and compared", done, len(jobs))
        made[job.spec.name] = _make(shop, job, two_bit if job.spec.name in SLM_GRAPHS else None)
    progress.step("graphs compiled and compared", len(jobs), len(jobs))
    infos = {name: one.info for name, one in made.items()}
    shared = _share(shop, inputs[SLM], made, two_bit) if config.gates.shared_binary else None
    if shared:
        infos[SHARED] = shared.info
    write_json(out_dir / CONTEXTS_FILE, infos)
    write_json(out_dir / PARITY_FILE, {name: one.report for name, one in made.items() if one.report})
    return {
        "target": f"{config.target.name}: {config.target.marketing_name}, Hexagon v{config.target.htp_arch}",
        "compiler": config.compiler,
        "graphs": {name: one.metrics for name, one in made.items()},
        **({SHARED: shared.metrics} if shared else {}),
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
    return Job(folder / f"{HEAD_GRAPH}.onnx", folder / HEAD_SAMPLES_FILE, head.graph)


def _slm_jobs(folder: Path) -> list[Job]:
    slm = read_spec(folder / SLM_SPEC_FILE, SlmSpec)
    samples, weights = folder / SLM_SAMPLES_FILE, folder / WEIGHTS_FILE
    open_floats = cache(lambda: open_torch_slm(folder))  # gigabytes: only where a graph is compared
    tree, prefill = (folder / f"{name}.onnx" for name in SLM_GRAPHS)
    return [
        Job(tree, samples, slm.tree, weights, lambda: open_floats().tree),
        Job(prefill, samples, slm.prefill, weights, lambda: open_floats().prefill),
    ]


def _make(shop: Workshop, job: Job, two_bit: TwoBit | None) -> Made:
    """One graph's pair in the artifact, taken over or compiled, and its comparison.

    Raises:
        CompileError, StorageError, GateError: it cannot be made, or is not what the graph says.
    """
    name, gates = job.spec.name, shop.config.gates
    reading = _read(job, two_bit, gates.emulated_feeds)
    release_freed()  # of what was read, and of the graph before on the CPU: the compiler's process needs the memory
    key = made_from(job.model, shop.config.target, reading.two_bit, shop.digest)
    made = _taken_over(shop, name, key) or _compiled(shop, job, reading.two_bit)
    limits = ParityLimits(gates.output_range_share, gates.max_outside_share, gates.min_id_agreement)
    report, compared = None, ""
    if reading.feeds:
        files = [path for path in (job.samples, job.weights) if path]
        compared = compared_by(key, files, [msgspec.to_builtins(limits), reading.feeds], shop.digest)
        report = shop.earlier.report(name, compared) or _compare(shop, job, limits, reading.feeds)
        _require_parity(report)
    metrics = {**made.metrics, MADE_FROM: key, COMPARED_BY: compared, **_comparison_metrics(report)}
    return Made(made.info, metrics, report)


def _taken_over(shop: Workshop, name: str, key: str) -> Made | None:
    """The pair of the artifact before, if it was made from the same and is whole."""
    metrics, info = shop.earlier.metrics(name, key), shop.earlier.info(name)
    if (
        metrics is None
        or info is None
        or not shop.earlier.take([f"{name}_ctx.onnx", f"{name}_ctx_*.bin"], shop.out_dir)
    ):
        return None
    shop.progress.note(f"  {name}: {TAKEN_OVER}, its graph is the one that was compiled before")
    return Made(info, {**metrics, BINARY: TAKEN_OVER})


def _compiled(shop: Workshop, job: Job, two_bit: TwoBit | None) -> Made:
    with full_disk_named(shop.out_dir, job.model):
        context = compile_context(job.model, shop.out_dir, job.spec.name, shop.config.target, shop.log, two_bit)
    return Made(context.info, {**_context_metrics(context), BINARY: COMPILED})


def _two_bit(config: CompileConfig, weights: Path, progress: Progress) -> TwoBit | None:
    """The SLM's 2-bit weights and the backend that stores them so; None, and a note, where it cannot be built."""
    if not config.gates.two_bit_weights:
        return None
    try:
        if not config.c_compiler:
            raise CompileError("no C compiler was found ($CC, cc)", "install one, for example gcc")
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


def _share(shop: Workshop, slm: Path, made: Mapping[str, Made], two_bit: TwoBit | None) -> Made:
    """Both SLM graphs, which passed on their own, in one binary."""
    key = content_digest([made[name].metrics[MADE_FROM] for name in SLM_GRAPHS])
    earlier, info = shop.earlier.shared_metrics(key), shop.earlier.info(SHARED)
    if earlier is not None and info is not None and shop.earlier.take(["*_shared_ctx*"], shop.out_dir):
        return Made(info, {**earlier, BINARY: TAKEN_OVER})
    models = [slm / f"{name}.onnx" for name in SLM_GRAPHS]
    with full_disk_named(shop.out_dir, *models):
        shared = compile_shared(models, shop.out_dir, SLM_GRAPHS, shop.config.target, shop.log, two_bit)
    apart = sum(path.stat().st_size for name in SLM_GRAPHS for path in shop.out_dir.glob(f"{name}_ctx_*.bin"))
    return Made(shared.info, {**_shared_metrics(shared, apart), BINARY: COMPILED, MADE_FROM: key})


def _compare(shop: Workshop, job: Job, limits: ParityLimits, count: int) -> ParityReport:
    """Run the first `count` sample feeds through the binary and the QDQ graph on the CPU."""
    feeds = read_samples(job.samples)[job.spec.name][:count]
    floats = job.open_float() if job.open_float else None
    with open_context(shop.out_dir / f"{job.spec.name}_ctx.onnx", shop.config.target, shop.log) as compiled:
        return compare_sessions(ReferenceSession(job.model), compiled, job.spec, feeds, limits, floats)


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


def _context_metrics(context: CompiledContext) -> Metrics:
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
    }


def _comparison_metrics(report: ParityReport | None) -> Metrics:
    return {
        "feeds": report.runs if report else 0,
        "parity": {output.name: _parity_metrics(output) for output in report.outputs} if report else "not emulated",
    }


def _shared_metrics(shared: SharedContext, separate_bytes: int) -> Metrics:
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
