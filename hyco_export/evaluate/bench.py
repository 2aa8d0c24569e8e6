"""`bench`: named systems over prompts and seeds, interleaved in one run, resumable; then a table of their measures."""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

import hyco_export
from hyco_export.core.artifact import content_digest, file_digest
from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe import Drafting
from hyco_export.evaluate.connect import OnStep, Prompt
from hyco_export.evaluate.device_times import Scale, on_device
from hyco_export.evaluate.metrics import SystemMetrics, measure
from hyco_export.evaluate.runs import SystemRunner, prompt_seed, turns, warm_up
from hyco_export.evaluate.summary import number, plain_table, server_time, system_name
from hyco_export.evaluate.traces import TraceStore
from hyco_export.protocol.wire import Sampling

CPU_INFO = Path("/proc/cpuinfo")


class BenchPlan(msgspec.Struct, frozen=True):
    """What is run; a folder of traces belongs to one plan and is resumed by an equal one.

    It holds whatever changes a token or a time: generations of other weights, prompts, options, links, releases or
    machines must not be pooled. `artifacts`, `verifier`, `texts` (the prompts' ids) and `code` are digests.
    """

    systems: tuple[str, ...]  # the first is the baseline of the table
    backend: str
    prompts: tuple[str, ...]  # names
    texts: str
    seeds: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    artifacts: str
    verifier: str
    drafting: Drafting
    epsilon: float
    first_reply_rows: int
    threads: int  # of torch, where the recipe leaves them to it
    machine: str
    code: str
    server: str  # name and version
    clock: str  # of its server_ms
    link: str | None  # that times are counted over
    link_waits: bool
    evidence: bool = False  # p~ of every node is kept, so that other rules can be replayed
    kept_tokens: int = 0  # of the artifacts' keep set


def texts_digest(prompts: Sequence[Prompt]) -> str:
    """Of the prompts' ids, in their order."""
    return content_digest([prompt.ids for prompt in prompts])


def this_machine() -> str:
    """Processor and cores: what a device's times depend on."""
    names = re.findall(r"^model name\s*: (.*)$", CPU_INFO.read_text() if CPU_INFO.exists() else "", flags=re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def code_digest() -> str:
    """Of the package's modules: another commit may take other times."""
    root = Path(hyco_export.__file__).parent
    return content_digest({str(path.relative_to(root)): file_digest(path) for path in sorted(root.rglob("*.py"))})


def run_bench(
    plan: BenchPlan, runner: SystemRunner, prompts: Sequence[Prompt], store: TraceStore, on_step: OnStep
) -> None:
    """Make the generations that the store does not hold yet; seed by seed, within it prompt by prompt in `turns`.

    `runner` draws with its own seed + repeat: plan.seeds must be consecutive and start with it.
    """
    todo = [
        (system, prompt, repeat)
        for repeat, seed in enumerate(plan.seeds)
        for system, prompt in turns(plan.systems, prompts)
        if not store.holds(system, prompt.id, prompt_seed(seed, prompt.id))
    ]
    if not todo:
        return
    total = len(plan.systems) * len(plan.prompts) * len(plan.seeds)
    warm_up(runner, plan.systems, plan.backend, prompts[0], plan.sampling)
    for done, (system, prompt, repeat) in enumerate(todo, total - len(todo) + 1):
        store.add(runner.generate(system, plan.backend, prompt, plan.sampling, plan.max_new_tokens, repeat))
        on_step("generations", done, total)


def measure_bench(
    plan: BenchPlan, store: TraceStore, keepset: KeepSet, scale: Scale | None = None
) -> tuple[SystemMetrics, ...]:
    """The measures of every system, pooled over prompts and seeds; with `scale` in a device's times."""
    found = []
    for system in plan.systems:
        traces = store.traces(system)
        found.append(measure(system, traces if scale is None else [on_device(t, scale) for t in traces], keepset))
    return tuple(found)


def chosen_budgets(plan: BenchPlan, store: TraceStore) -> str:
    """The nodes that the systems sent a round, where the device chose them; "" where it did not."""
    if plan.drafting.budget != "auto":
        return ""
    found = []
    for system in plan.systems:
        sizes = [len(record.tree) for trace in store.traces(system) for record in trace.rounds]
        if any(sizes):
            low, middle, high = np.percentile(sizes, [5, 50, 95])
            found.append(f"{system} {np.mean(sizes):.1f} ({low:.0f} / {middle:.0f} / {high:.0f})")
    return f"nodes sent a round, mean (p5 / p50 / p95): {', '.join(found)}" if found else ""


HEADINGS = (
    "MAT",
    "server ms\nper token",
    "tok/s",
    "draft ms\nper token",
    "TTFT\nms",
    "B up\na round",
    "B down\na round",
)


def bench_table(systems: Sequence[SystemMetrics], title: str) -> Table:
    """One line a system; the server's time per token with its change against the first."""
    table = plain_table(title)
    table.add_column("system", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for system in systems:
        table.add_row(
            system_name(system),
            number(system.mat, 2),
            server_time(system, systems[0]),
            number(system.delivery_tokens_per_s, 1),
            number(system.draft_ms_per_token, 2),
            number(system.first_token_ms, 0),
            f"{system.bytes_up.payload_mean:,.0f}",
            f"{system.bytes_down.payload_mean:,.0f}",
        )
    return table
