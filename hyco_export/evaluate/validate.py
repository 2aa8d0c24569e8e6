"""`validate`: drives a server with a run's artifacts and judges the run.

The order: does the server answer and belong to this run; what is wrong with it or the artifacts (`diagnose`); do the
graphs agree; how do the systems perform; are greedy texts lossless on every back end; then the gates.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import hyco_export
from hyco_export.core.deferred import Deferred
from hyco_export.core.recipe import Validation
from hyco_export.device.interfaces import Transport
from hyco_export.device.systems import find_system
from hyco_export.errors import HycoError, counted
from hyco_export.evaluate.backend_parity import FLOAT, INTEGER, NPU, GraphParity, compare_backends
from hyco_export.evaluate.connect import (
    Connection,
    OnStep,
    Prompt,
    RunArtifacts,
    Subject,
    connect,
    read_prompts,
    wire_sampling,
)
from hyco_export.evaluate.diagnosis.finding import Diagnosis
from hyco_export.evaluate.gates import Losslessness, run_gates
from hyco_export.evaluate.link_costs import link_note, padding_note
from hyco_export.evaluate.metrics import SystemMetrics, caveats, headline, measure, measure_traffic
from hyco_export.evaluate.pictures import median_times, pick_tree
from hyco_export.evaluate.report import Report
from hyco_export.evaluate.runs import DeviceRunner, SystemRunner, check_greedy, plain_texts, run_interleaved
from hyco_export.evaluate.traces import write_traces
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import ServerInfo

diagnose = Deferred("hyco_export.evaluate.diagnosis.diagnose:diagnose")  # torch: after the server has answered


@dataclass(frozen=True)
class Findings:
    """Results of a validation before they are held against gates."""

    info: ServerInfo
    artifacts: RunArtifacts
    prompts: int
    traces: Mapping[str, Sequence[GenerationTrace]]  # of the sampled systems
    losslessness: tuple[Losslessness, ...]
    parity: tuple[GraphParity, ...]
    diagnosis: Diagnosis


def validate(
    subject: Subject,
    url: str,
    on_step: OnStep,
    traces: Path | None = None,
    transport: Transport | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Everything `hyco-export validate` finds out from the server at `url`.

    Args:
        traces: folder for the sampled generations with what each round was judged by, `<system>.jsonl`; None for none.
        transport: calls it with a token, or as if over a link; None for plain calls.
        clock: seconds; the link's, where there is one.

    Raises:
        ServerError: nobody answers at `url`, or a server that does not belong to this run.
        RecipeError: the prompts cannot be used.
    """
    started_at, began = datetime.now(UTC), time.monotonic()
    connection = connect(subject, url, transport)
    found = examine(subject, connection, on_step, traces is not None, clock)
    if traces is not None:
        for name, generations in found.traces.items():
            write_traces(traces / f"{name}.jsonl", generations)
    report = judge(subject, url, found, lambda token: str(connection.tokenizer.decode([token])))
    duration_s = time.monotonic() - began
    return msgspec.structs.replace(report, started_at=started_at.isoformat(timespec="seconds"), duration_s=duration_s)


def examine(
    subject: Subject,
    connection: Connection,
    on_step: OnStep,
    trace: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Findings:
    """Drive the server. Raises as `validate`."""
    recipe, plan, artifacts, info = subject.recipe, subject.recipe.validation, connection.artifacts, connection.info
    prompts = read_prompts(subject.prompts, connection.tokenizer, plan.prompts)
    diagnosis: Diagnosis = diagnose(
        artifacts, recipe, subject.checkpoints, connection.tokenizer, connection.transport, info, on_step
    )
    with _with_findings(diagnosis):
        return _measure(subject, connection, prompts, diagnosis, on_step, trace, clock)


def _measure(
    subject: Subject,
    connection: Connection,
    prompts: Sequence[Prompt],
    diagnosis: Diagnosis,
    on_step: OnStep,
    trace: bool,
    clock: Callable[[], float],
) -> Findings:
    """Compare the graphs, then run every system."""
    recipe, plan, artifacts, info = subject.recipe, subject.recipe.validation, connection.artifacts, connection.info
    parity = compare_backends(artifacts, recipe.target, on_step)
    with DeviceRunner(artifacts, recipe, connection.transport, info, trace, clock) as runner:
        sampling = wire_sampling(recipe)
        traces = run_interleaved(runner, plan.systems, INTEGER, prompts, sampling, plan.max_new_tokens, on_step)
        losslessness = check_backends(runner, prompts, plan, on_step)
    return Findings(info, artifacts, len(prompts), traces, losslessness, parity, diagnosis)


@contextmanager
def _with_findings(diagnosis: Diagnosis) -> Iterator[None]:
    """Add the findings to an error that ended the validation: one of them may have caused it."""
    try:
        yield
    except HycoError as error:
        if diagnosis.findings:
            error.message += "; the diagnosis before it: " + "; ".join(map(str, diagnosis.findings))
        raise


def judge(subject: Subject, url: str, found: Findings, text_of: Callable[[int], str]) -> Report:
    """Measure the findings and hold them against the recipe's gates. Pure; the times of the run are still empty."""
    recipe, plan = subject.recipe, subject.recipe.validation
    keepset = found.artifacts.keepset
    systems = tuple(measure(name, found.traces[name], keepset) for name in plan.systems)
    asking = [name for name in plan.systems if find_system(name).asks]
    handoffs = {name: found.artifacts.head.handoff if find_system(name).needs_handoff else None for name in asking}
    traffic = tuple(measure_traffic(name, found.traces[name], handoffs[name]) for name in asking)
    shown = headline(asking)
    drawn = (pick_tree(found.traces[name], text_of) for name in (shown, *reversed(asking)))
    return Report(
        run=str(subject.root),
        recipe=recipe.name,
        target=recipe.target,
        url=url,
        started_at="",
        duration_s=0.0,
        version=hyco_export.__version__,
        server=found.info,
        sampling=wire_sampling(recipe),
        epsilon=plan.epsilon,
        max_new_tokens=plan.max_new_tokens,
        chain_acceptance=recipe.drafting.chain_acceptance,
        backend=INTEGER,
        systems=systems,
        losslessness=found.losslessness,
        parity=found.parity,
        traffic=traffic,
        diagnosis=found.diagnosis,
        gates=run_gates(plan.gates, systems, found.losslessness, found.parity, traffic),
        times=tuple(filter(None, (median_times(name, found.traces[name]) for name in asking))),
        tree=next(filter(None, drawn), None),
        notes=(
            *notes(plan, found.prompts),
            *system_notes(systems, len(keepset), keepset.vocab_size),
            link_note(found.traces[name] for name in asking),
            padding_note(shown, [record for trace in found.traces[shown] for record in trace.rounds]),
        ),
    )


def check_backends(
    runner: SystemRunner, prompts: Sequence[Prompt], plan: Validation, on_step: OnStep
) -> tuple[Losslessness, ...]:
    """Greedy losslessness of the recipe's systems on every back end; the emulator gets fewer and shorter texts."""
    plain = plain_texts(runner, FLOAT, prompts, plan.max_new_tokens, on_step)
    cases = (
        (FLOAT, prompts, plan.max_new_tokens),
        (INTEGER, prompts, plan.max_new_tokens),
        (NPU, prompts[: plan.emulator_prompts], emulator_tokens(plan)),
    )
    return tuple(
        check_greedy(runner, system, backend, chosen, plain, limit, on_step)
        for system in plan.greedy_systems
        for backend, chosen, limit in cases
    )


def emulator_tokens(plan: Validation) -> int:
    """Tokens of a text in the emulator: never more than the plain text it is compared with."""
    return min(plan.emulator_max_new_tokens, plan.max_new_tokens)


def notes(plan: Validation, found: int) -> tuple[str, ...]:
    """Notes without which the figures would be misread."""
    emulated = counted(min(plan.emulator_prompts, found), "prompt")
    lines = [
        f"The {NPU} back end ran {emulated} of up to {emulator_tokens(plan)} "
        "tokens: off a Snapdragon host the vendor's library emulates the NPU on the CPU, about a second a pass.",
        f"The sampled systems ran on {INTEGER}: the integer graphs that were compiled, with ONNX Runtime's own "
        "optimisations off, so draft times are those of a reference, not of a phone.",
    ]
    return tuple(lines)


def system_notes(systems: Sequence[SystemMetrics], kept: int, vocab_size: int) -> tuple[str, ...]:
    """What systems claim less than the others, what disturbed them, and over which vocabulary the SLM drafts."""
    lines = []
    for system in systems:
        if not find_system(system.system).verifies_all:
            lines.append(
                f"{system.system} is not lossless: {system.unverified_tokens:,} of {system.output_tokens:,} tokens are "
                "unverified: the device committed them, and no verifier chose them."
            )
        if system.threshold_stops:
            answers = counted(system.threshold_stops, "answer")
            lines.append(f"{system.system}: {answers} ended at a stop token by threshold alone.")
        if system.reused_rounds:
            lines.append(
                f"{system.system}: {system.reused_rounds:,} of {system.rounds:,} rounds began with a tree that was "
                "grown while the reply before was on its way."
            )
    if any(find_system(system.system).drafts_with_slm_alone for system in systems):
        lines.append(f"The SLM drafts over its artifact's {kept:,} of {vocab_size:,} tokens.")
    return (*lines, *caveats(systems))
