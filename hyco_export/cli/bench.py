"""What `bench` does: open the run, start a server or meet one, make what is missing, print the table."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.connection import ConnectOptions, transport_to
from hyco_export.cli.console import ConsoleProgress, output, show_next
from hyco_export.cli.invocation import command_line
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.cli.options import open_run, require_built, require_readable_twice
from hyco_export.cli.server_process import server_process
from hyco_export.cli.validation import subject_of
from hyco_export.core.data.prompts import PROMPT_COUNT
from hyco_export.core.device_profile import read_profile
from hyco_export.core.files import folder_lock, write_json
from hyco_export.device.backends import find_backend
from hyco_export.device.systems import find_baseline, find_system
from hyco_export.errors import HycoError, counted, interrupt_keeps
from hyco_export.evaluate.traces import TraceStore, kept_generations
from hyco_export.stages.run_folder import RunFolder

if TYPE_CHECKING:
    from hyco_export.core.device_profile import DeviceProfile
    from hyco_export.core.keepset import KeepSet
    from hyco_export.evaluate.bench import BenchPlan
    from hyco_export.evaluate.connect import Connection
    from hyco_export.evaluate.device_times import Scale
    from hyco_export.evaluate.metrics import SystemMetrics

BENCH_FOLDER, RESULT_FILE = "bench", "systems.json"


class BenchOptions(msgspec.Struct, frozen=True):
    """What the command line says; None where the recipe's validation decides."""

    systems: tuple[str, ...]
    backend: str
    prompts: int | None
    seeds: int
    max_new_tokens: int | None
    out: Path | None
    asked: SetOptions = SetOptions()  # a set of questions, in place of the recipe's prompts
    evidence: bool = False


def bench_run(
    server: str | None,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    options: BenchOptions,
    connecting: ConnectOptions,
    device: str | None = None,
) -> None:
    """Run it against the server at `server`, or against one of its own for the length of the run.

    Raises:
        HycoError: systems that `require_systems` refuses, an unknown back end or number; a device for a server that
            runs already.
    """
    require_own_server(server, device)
    require_systems(options.systems)
    find_backend(options.backend)
    options.asked.check()
    if server is None:
        require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir, target)
    run.recipe.models.require_head()
    require_built(run)
    folder = options.out or run.root / BENCH_FOLDER
    work = _bench_questions if options.asked.is_set else _bench
    with_server(
        server,
        recipe_path,
        run.root,
        folder,
        connecting,
        lambda url, reach: work(run, url, options, reach, folder),
        device,
    )
    show_next(f"{command_line('report')} {shlex.quote(str(folder))}")


def require_own_server(server: str | None, device: str | None) -> None:
    """Where a server runs is decided when it is started.

    Raises:
        HycoError: both are given.
    """
    if server is not None and device is not None:
        raise HycoError(
            f"--device {device}: the server at {server} runs already",
            "leave it out, or start that server with it",
        )


def with_server(
    server: str | None,
    recipe_path: Path | None,
    run_dir: Path,
    folder: Path,
    connecting: ConnectOptions,
    work: Callable[[str, ConnectOptions], None],
    device: str | None = None,
) -> None:
    """Do `work` against the server at `server`, or against one of its own that ends with it; an interrupt counts the
    generations in `folder`."""

    def kept() -> str:
        return kept_generations(folder)

    with interrupt_keeps(kept):
        if server is not None:
            work(server, connecting)
            return
        with server_process(recipe_path, run_dir, kept, device) as own:
            work(own.url, msgspec.structs.replace(connecting, still_there=own.require_running))


def _bench(run: RunFolder, url: str, options: BenchOptions, connecting: ConnectOptions, folder: Path) -> None:
    from hyco_export.evaluate.bench import run_bench, texts_digest
    from hyco_export.evaluate.connect import connect, read_prompts
    from hyco_export.evaluate.runs import DeviceRunner

    transport, clock = transport_to(url, connecting, run.recipe.validation.seed)
    subject = subject_of(run)
    connection = connect(subject, url, transport)
    recipe, limits = run.recipe, run.recipe.validation
    asked_by = "--prompts" if options.prompts else PROMPT_COUNT
    prompts = read_prompts(subject.prompts, connection.tokenizer, options.prompts or limits.prompts, asked_by)
    plan = bench_plan(
        run, connection, connecting, options, tuple(prompt.id for prompt in prompts), texts_digest(prompts)
    )
    with folder_lock(folder, "trace folder", "benching", "--out"):
        store = TraceStore(folder, plan, plan.systems)
        device = DeviceRunner(
            connection.artifacts, recipe, transport, connection.info, trace=plan.evidence, clock=clock
        )
        with device as runner, ConsoleProgress() as bars:
            run_bench(plan, runner, prompts, store, bars.step)
        show_systems(run, plan, store, connection.artifacts.keepset, counted(len(prompts), "prompt"))


def _bench_questions(run: RunFolder, url: str, options: BenchOptions, connecting: ConnectOptions, folder: Path) -> None:
    """The same over a set's questions, whose later turns hold a system's own answers."""
    from hyco_export.cli.measure.questions import answer_questions, show_coverage

    with answer_questions(run, url, options, connecting, folder, retry_failed=True) as answered:
        show_coverage(answered)  # first: a system whose answers all failed has no figures
        title = counted(len(answered.questions), "question")
        show_systems(run, answered.plan, answered.store, answered.keepset, title)


def bench_plan(
    run: RunFolder,
    connection: "Connection",
    connecting: ConnectOptions,
    options: BenchOptions,
    prompts: tuple[str, ...],
    texts: str,
) -> "BenchPlan":
    """What is run against this server; `texts` is the digest of what is asked."""
    import torch

    from hyco_export.evaluate.bench import BenchPlan, code_digest, this_machine
    from hyco_export.evaluate.connect import wire_sampling

    recipe, limits = run.recipe, run.recipe.validation
    return BenchPlan(
        systems=options.systems,
        backend=options.backend,
        prompts=prompts,
        texts=texts,
        seeds=tuple(range(limits.seed, limits.seed + options.seeds)),
        sampling=wire_sampling(recipe),
        max_new_tokens=options.max_new_tokens or limits.max_new_tokens,
        artifacts=connection.artifacts.compiled_key,
        verifier=connection.info.verifier_digest,
        drafting=recipe.drafting,
        epsilon=limits.epsilon,
        first_reply_rows=limits.first_reply_rows,
        threads=recipe.threads or torch.get_num_threads(),
        machine=this_machine(),
        code=code_digest(),
        server=connection.info.server,
        clock=connection.info.clock,
        link=connecting.link,
        link_waits=connecting.link_waits,
        evidence=options.evidence,
        kept_tokens=len(connection.artifacts.keepset.ids),
    )


def show_systems(
    run: RunFolder, plan: "BenchPlan", store: TraceStore, keepset: "KeepSet", asked: str
) -> "tuple[SystemMetrics, ...]":
    """Measure the systems of a folder, keep the measures there, print the table; `asked` is what was, with its count.

    Raises:
        HycoError: a system has not a single round.
    """
    from hyco_export.evaluate.bench import bench_table, chosen_budgets, measure_bench
    from hyco_export.evaluate.metrics import caveats

    profile = read_profile(run.root, run.recipe.target)
    measured = measure_bench(plan, store, keepset, _device_scale(profile, plan.backend, run))
    write_json(store.folder / RESULT_FILE, measured)
    output.print(bench_table(measured, _title(plan, asked, profile)), crop=False)
    if budgets := chosen_budgets(plan, store):
        output.print(budgets, soft_wrap=True)
    cost = ("The server's times hold the making of p~, which only the traces need.",) if plan.evidence else ()
    for line in (*caveats(measured), *cost):
        output.print(f"note: {line}", style="dim", soft_wrap=True)
    output.print(f"traces: {store.folder}", soft_wrap=True)
    return measured


def _title(plan: "BenchPlan", asked: str, profile: "DeviceProfile | None") -> str:
    seeds = f", {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
    over = f", times as over {plan.link}" if plan.link else ""
    times = f", head and SLM in the times of {profile.device}" if profile else ""
    return f"{asked}{seeds}, device back end {plan.backend}{over}{times}"


def _device_scale(profile: "DeviceProfile | None", backend: str, run: RunFolder) -> "Scale | None":
    from hyco_export.device.backends import find_backend
    from hyco_export.evaluate.device_times import scale_to

    return None if profile is None else scale_to(profile, find_backend(backend), run.root, run.recipe.target)


def require_systems(names: Sequence[str]) -> None:
    """Before a server is started.

    Raises:
        HycoError: no name, one twice, one that is no system, or a first one that the others cannot be compared with.
    """
    if not names:
        raise HycoError("--systems names no system", "give at least one, the baseline first")
    find_baseline(names[0])
    for name in names:
        find_system(name)
    if len(set(names)) != len(names):
        raise HycoError(f"--systems is {','.join(names)!r}, names must be unique", "give each once")


def split_names(text: str) -> tuple[str, ...]:
    """The names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
