"""What `sweep` does: build what the points need, run each distinct configuration once, print and draw the trade-off.

Folders under --out: `artifacts-KEY`, a run folder for each distinct set of artifacts that is not the run's own (what is
fresh elsewhere is hard-linked); `traces-KEY` for each distinct run. Both are found again by their keys, so that a sweep
that was stopped goes on.
"""

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hyco_export.cli.bench import BenchOptions, bench_plan
from hyco_export.cli.connection import ConnectOptions, transport_to
from hyco_export.cli.console import ConsoleProgress, output, show_next
from hyco_export.cli.invocation import command_line
from hyco_export.cli.options import open_run
from hyco_export.cli.server_process import ServerProcess, server_process
from hyco_export.cli.validation import subject_of
from hyco_export.core.artifact import MANIFEST_NAME, content_digest, read_manifest
from hyco_export.core.files import folder_lock, locate, write_json
from hyco_export.core.recipe import Recipe
from hyco_export.device.backends import find_backend
from hyco_export.errors import counted
from hyco_export.evaluate.planning.grid import KEY_DIGITS, Grid, Run, points_of, read_grid, runs_of, trace_folder
from hyco_export.stages.plan import PlannedStage, plan
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of

if TYPE_CHECKING:
    from hyco_export.core.keepset import KeepSet
    from hyco_export.evaluate.metrics import SystemMetrics
    from hyco_export.evaluate.planning.tradeoff import Row
    from hyco_export.protocol.trace import GenerationTrace

SWEEP_FOLDER = "sweep"
PATH_FIELDS = ("model", "path", "calibration", "validation", "conversations")  # of a recipe: where something lies


class SweepOptions(msgspec.Struct, frozen=True):
    """What the command line says."""

    grid: Path
    out: Path | None
    evaluation: Path | None
    metric: str
    dry_run: bool


class Group(msgspec.Struct, frozen=True):
    """Runs that share artifacts and server."""

    folder: RunFolder
    chain: tuple[PlannedStage, ...]
    runs: tuple[Run, ...]


def sweep_run(
    recipe_path: Path | None, run_dir: Path | None, target: str | None, options: SweepOptions, reach: ConnectOptions
) -> None:
    """Sweep the grid and write `sweep.json`, `sweep.csv` and `sweep.svg`.

    Raises:
        HycoError: a grid, point or evaluation that cannot be used; a stage that failed.
    """
    base = open_run(recipe_path, run_dir, target)
    base.recipe.models.require_head()
    grid = read_grid(options.grid)
    find_backend(grid.backend)
    quality = _quality(options)
    runs = runs_of(points_of(grid, base.recipe))
    out = options.out or base.root / SWEEP_FOLDER
    groups = grouped(base, runs, out)
    folders = [base, *(group.folder for group in groups)]
    for line in told(groups, folders):
        output.print(line, soft_wrap=True)
    if options.dry_run:
        show_next(f"{command_line('sweep')} {shlex.quote(str(options.grid))}")
        return
    with folder_lock(out, "folder of the sweep", "sweeping", "--out"):
        for group in groups:
            _build(group, folders)
        _finish(*_measured(grid, groups, out, reach, quality), out, options, base)


def _quality(options: SweepOptions) -> dict[str, float]:
    from hyco_export.evaluate.planning.tradeoff import read_quality

    return read_quality(options.evaluation, options.metric) if options.evaluation else {}


def grouped(base: RunFolder, runs: Sequence[Run], out: Path) -> tuple[Group, ...]:
    """Runs by the artifacts that they need: the run's own folder where its keys are the same. Paths of the runs'
    recipes are whole in them: no group has a recipe's folder."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        whole = _with_whole_paths(run.recipe, base.recipe_folder)
        alike.setdefault(_made_of(run.recipe), []).append(msgspec.structs.replace(run, recipe=whole))
    own = plan(base, stages_of(base.recipe))[-1].key
    groups: dict[str, Group] = {}
    for same in alike.values():  # a plan reads every artifact: one for each set of configurations
        recipe = same[0].recipe
        folder = RunFolder(base.root, recipe, None)
        chain = plan(folder, stages_of(recipe))
        key = chain[-1].key
        if key in groups:
            groups[key] = msgspec.structs.replace(groups[key], runs=(*groups[key].runs, *same))
            continue
        if key != own:
            folder = RunFolder(out / f"artifacts-{key[:KEY_DIGITS]}", recipe, None)
            chain = plan(folder, stages_of(recipe))
        groups[key] = Group(folder, tuple(chain), tuple(same))
    return tuple(groups.values())


def _made_of(recipe: Recipe) -> str:
    """Of all that a recipe's artifacts are made from, as it says it."""
    configs = [stage.config(recipe) for stage in stages_of(recipe)]
    return content_digest([configs, recipe.models, recipe.data, recipe.target])


def told(groups: Sequence[Group], folders: Sequence[RunFolder]) -> Iterator[str]:
    """What will be done, a line a group."""
    for group in groups:
        points = [point for run in group.runs for point in run.points]
        replayed = len(points) - len(group.runs)
        lacking = [item.stage.name for item in group.chain if not item.fresh and _twin(item, folders) is None]
        build = f"builds {', '.join(lacking)}" if lacking else "every artifact is there"
        rules = f", {replayed} more replayed" if replayed else ""
        yield f"{group.folder.root}: {build}; {counted(len(group.runs), 'run')}{rules}"


def _with_whole_paths(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with its relative paths made absolute: it is written elsewhere for the server of its group."""

    def whole(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: whole(part, key) for key, part in value.items()}
        if isinstance(value, list):
            return [whole(part) for part in value]
        if name in PATH_FIELDS and isinstance(value, str) and (found := locate(value, folder)) is not None:
            return str(found.resolve())
        return value

    values = msgspec.to_builtins(recipe)
    return msgspec.convert(values | {part: whole(values[part]) for part in ("models", "data")}, Recipe)


def _build(group: Group, others: Sequence[RunFolder]) -> None:
    """Make the group's artifacts; those that another run folder has with the same key are linked."""
    from hyco_export.stages.runner import build_all

    stages = stages_of(group.folder.recipe)
    for item in group.chain:
        twin = _twin(item, others)
        if twin is not None and not item.folder.exists():
            _link(twin, item.folder)
    if not all(item.fresh for item in plan(group.folder, stages)):
        with ConsoleProgress() as progress:
            build_all(group.folder, stages, progress)


def _twin(item: PlannedStage, others: Sequence[RunFolder]) -> Path | None:
    """The same artifact in another run folder."""
    for other in others:
        found = other.folder(item.stage)
        if found != item.folder and (found / MANIFEST_NAME).is_file() and read_manifest(found).key == item.key:
            return found
    return None


def _link(found: Path, folder: Path) -> None:
    """Hard links to an artifact's files; copies on another disk. The folder appears whole."""
    draft = folder.with_name(f".{folder.name}.linking")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(found, draft, copy_function=_link_or_copy)
    draft.replace(folder)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _measured(
    grid: Grid, groups: Sequence[Group], out: Path, reach: ConnectOptions, quality: dict[str, float]
) -> tuple["SystemMetrics", list["Row"]]:
    """The baseline's measures, with the first group's artifacts, and the rows of all points."""
    from hyco_export.evaluate.metrics import measure
    from hyco_export.evaluate.planning.tradeoff import rows_of

    baseline: SystemMetrics | None = None
    rows: list[Row] = []
    for group in groups:
        recipe_file = out / f"{group.folder.root.name}.recipe.json"
        write_json(recipe_file, group.folder.recipe)
        with ExitStack() as stack:
            server = stack.enter_context(server_process(recipe_file, group.folder.root))
            if baseline is None:
                first = Run("baseline", group.folder.recipe, grid.baseline, ())
                traces, keepset = _generations(first, grid, group, server, out, reach)
                baseline = measure(grid.baseline, traces, keepset)
            for run in group.runs:
                traces, keepset = _generations(run, grid, group, server, out, reach)
                rows += rows_of(run, traces, keepset, baseline, quality)
    assert baseline is not None  # a grid has a point
    return baseline, rows


def _generations(
    run: Run, grid: Grid, group: Group, server: ServerProcess, out: Path, reach: ConnectOptions
) -> tuple[Sequence["GenerationTrace"], "KeepSet"]:
    """The run's generations with p~, those that are kept read again; and the keep set they drafted from."""
    from hyco_export.evaluate.bench import run_bench, texts_digest
    from hyco_export.evaluate.connect import connect, read_prompts
    from hyco_export.evaluate.runs import DeviceRunner
    from hyco_export.evaluate.traces import TraceStore, read_traces

    limits = run.recipe.validation
    own = RunFolder(group.folder.root, run.recipe, None)
    reach = msgspec.structs.replace(reach, still_there=server.require_running)
    transport, clock = transport_to(server.url, reach, limits.seed)
    subject = subject_of(own)
    connection = connect(subject, server.url, transport)
    prompts = read_prompts(subject.prompts, connection.tokenizer, grid.prompts or limits.prompts, "prompts")
    options = BenchOptions((run.system,), grid.backend, None, 1, grid.max_new_tokens, None)
    ids = tuple(prompt.id for prompt in prompts)
    made = bench_plan(own, connection, reach, options, ids, texts_digest(prompts))
    store = TraceStore(out / trace_folder(run), made, made.systems)
    device = DeviceRunner(connection.artifacts, run.recipe, transport, connection.info, trace=True, clock=clock)
    with device as runner, ConsoleProgress() as bars:
        numbers = ", ".join(str(point.number) for point in run.points)
        label = f"{run.system}, points {numbers}" if numbers else f"{run.system}, baseline"
        run_bench(made, runner, prompts, store, lambda _, done, total: bars.step(label, done, total))
    return read_traces(store.path(run.system)), connection.artifacts.keepset


def _finish(
    baseline: "SystemMetrics", rows: Sequence["Row"], out: Path, options: SweepOptions, base: RunFolder
) -> None:
    from hyco_export.evaluate.charts import write_picture
    from hyco_export.evaluate.cost_table import write_csv
    from hyco_export.evaluate.planning.tradeoff import Sweep, csv_rows, marked, picture, sweep_table

    result = Sweep(baseline, marked(rows), options.metric if options.evaluation else None)
    write_json(out / "sweep.json", result)
    write_csv(out / "sweep.csv", csv_rows(result))
    write_picture(out / "sweep.svg", picture(result))
    title = f"{counted(len(rows), 'point')} of {base.recipe.name}, change against {baseline.system}; dim: dominated"
    output.print(sweep_table(result, title), crop=False)
    if any(row.replayed for row in rows):
        output.print(
            "note: replayed rules judge each round of another rule's trees on its own", style="dim", soft_wrap=True
        )
    output.print(f"picture: {out / 'sweep.svg'}", soft_wrap=True)
    best = min(result.rows, key=lambda row: row.server_ms_per_token)
    show_next(f"{command_line('plan')} {shlex.quote(str(out / best.traces))}")
