"""What `validate` and `replay` do: meet the server or the traces, print the outcome, write the report."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import hyco_export
from hyco_export.cli.connection import ConnectOptions, transport_to
from hyco_export.cli.console import ConsoleProgress, output, show_next, show_rows
from hyco_export.cli.invocation import command_line, completed
from hyco_export.cli.options import open_run, require_built
from hyco_export.core.files import folder_lock, write_json
from hyco_export.errors import StorageError
from hyco_export.evaluate.replay import chosen_settings, replay
from hyco_export.evaluate.traces import read_traces, require_writable
from hyco_export.stages.declarations import use_threads
from hyco_export.stages.plan import require_current
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of

REPORT_FOLDER, TRACES_FOLDER = "validate", "traces"  # in the run folder, and in the folder of --out

if TYPE_CHECKING:
    from hyco_export.evaluate.connect import Subject
    from hyco_export.evaluate.report import Report


def validate_run(
    server: str,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    connecting: ConnectOptions,
    traces: Path | None,
    out: Path | None,
) -> int:
    """Validate the artifacts of a run against a server that somebody started."""
    return validate_in(open_run(recipe_path, run_dir, target), server, connecting, traces, out)


def validate_in(
    run: RunFolder, url: str, connecting: ConnectOptions, traces: Path | None = None, out: Path | None = None
) -> int:
    """Validate, print the summary, write the report; 0 when every gate holds, 1 when one does not.

    Args:
        out: where report and traces go, and with them the lock of a run folder that cannot be written.

    Raises:
        ArtifactError: no run folder, or another process works in it.
        StorageError: it cannot be written: said before the validation, for its report would be lost.
        OSError: the same of `traces`.
    """
    if out is not None:
        traces = traces or out / TRACES_FOLDER
    if traces is not None:
        require_writable(traces)
    require_built(run)
    if out is None and run.read_only:
        raise StorageError(f"run folder {run.root} cannot be written", "say where the report goes: --out DIR")

    from hyco_export.evaluate.report import Unfinished, unfinished_report

    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    recipe = run.recipe
    started = Unfinished(str(run.root), recipe.name, recipe.target, url, started_at, hyco_export.__version__)
    folder = out or run.root / REPORT_FOLDER
    with _held(run, out), unfinished_report(started, folder, completed):
        return _validate(run, url, connecting, traces, folder)


@contextmanager
def _held(run: RunFolder, out: Path | None) -> Iterator[None]:
    """Nobody builds or validates in the run folder meanwhile, where it can be written, nor writes to `out`."""
    own = nullcontext() if out is None else folder_lock(out, "folder", "validating", "--out")
    with own, nullcontext() if run.read_only else run.lock():
        yield


def _validate(run: RunFolder, url: str, connecting: ConnectOptions, traces: Path | None, folder: Path) -> int:
    run.recipe.models.require_head()
    transport, clock = transport_to(url, connecting, run.recipe.validation.seed)
    subject = subject_of(run)

    from hyco_export.evaluate.report import write_report  # heavy: after what is said at once
    from hyco_export.evaluate.summary import summary
    from hyco_export.evaluate.validate import validate

    with ConsoleProgress() as progress:
        report = validate(subject, url, progress.step, traces, transport, clock)
    report = with_completed_commands(report)
    output.print(summary(report), crop=False)
    _, page = write_report(report, folder)
    output.print(f"report: {page}", soft_wrap=True)
    if traces is not None and report.systems:
        logged = traces / f"{report.systems[-1].system}.jsonl"
        show_next(f"{command_line('replay')} {shlex.quote(str(logged))}")
    return 0 if report.verdict == "pass" else 1


def with_completed_commands(report: "Report") -> "Report":
    """The report with the commands of its findings as lines that work for this run."""
    found = [msgspec.structs.replace(one, next=completed(one.next)) for one in report.diagnosis.findings]
    return msgspec.structs.replace(report, diagnosis=msgspec.structs.replace(report.diagnosis, findings=tuple(found)))


def subject_of(run: RunFolder) -> "Subject":
    """What is driven against a server, once every stage is current.

    Raises:
        ArtifactError: an artifact is missing, altered, or of another recipe; said before anything heavy is imported.
    """
    from hyco_export.evaluate.connect import Checkpoints, Subject, open_artifacts

    head = run.recipe.models.require_head()
    require_current(run, stages_of(run.recipe))
    artifacts = open_artifacts(run.root, run.recipe.target)
    use_threads(run.recipe.threads)
    return Subject(
        root=run.root,
        recipe=run.recipe,
        artifacts=artifacts,
        checkpoints=Checkpoints(
            run.source("verifier", run.recipe.models.verifier),
            run.source("head", head),
            run.source("slm", run.recipe.models.slm),
        ),
        prompts=run.source("validation", run.recipe.data.validation),
    )


def replay_traces(
    paths: Sequence[Path],
    rule: str | None,
    epsilons: Sequence[float],
    stop_needs_draw: bool,
    options: dict[str, float],
    json_path: Path | None,
) -> None:
    """Print what each rule would have committed on the logged trees."""
    settings = chosen_settings(rule, epsilons, stop_needs_draw, options)
    traces = [trace for path in paths for trace in read_traces(path)]
    rows = [replay(traces, one) for one in settings]
    table = {
        row.label: {
            "MAT": row.mat,
            **row.tokens_by_rule,
            "stops": row.threshold_stops,
            "differ": row.differing,
        }
        for row in rows
    }
    recorded = sorted({trace.acceptance.rule for trace in traces})
    show_rows(f"{rows[0].rounds} rounds, recorded with {', '.join(recorded)}; each judged on its own", table)
    output.print("stops: by the threshold alone; differ: rounds that commit other tokens than recorded", style="dim")
    if json_path is not None:
        write_json(json_path, rows)
