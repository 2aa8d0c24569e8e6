"""Small folders of measurements, as `bench`, `evaluate` and `validate` leave them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hyco_export.core.files import write_json
from hyco_export.core.keepset import KeepSet
from hyco_export.evaluate.metrics import measure, without_evidence
from hyco_export.evaluate.report import write_report
from hyco_export.evaluate.traces import write_traces
from hyco_export.protocol.trace import GenerationTrace, RoundTrace
from hyco_export.protocol.tree import ROOT, path_to
from hyco_export.protocol.wire import Acceptance, Evidence, Traffic
from tests.evaluate.synthetic_reports import hybrid_tree, synthetic_report
from tests.evaluate.synthetic_traces import generation, round_trace

SYSTEMS = ("cloud-mtp", "hyco")
VERIFIER = "f" * 64
VOCAB = 512
KEEPSET = KeepSet(np.arange(0, VOCAB, 2), VOCAB)
EPSILON = 0.005


def judged_round(rng: random.Random, system: str, number: int, length: int) -> RoundTrace:
    """A round with p~: of `hyco` over a tree of 32 nodes, of another system over a chain that the server drafted."""
    noise = rng.uniform(0.8, 1.4)
    times = {"length": length, "number": number, "server_ms": 6.3 * noise, "wait_ms": 60.0 * noise}
    if system != "hyco":
        accepted = tuple(range(rng.choice([0, 1, 2, 4])))
        tokens, parents = (50, 51, 52, 53), (ROOT, 0, 1, 2)
        evidence = _evidence(rng, tokens, parents, accepted, (True,) * len(accepted))
        return round_trace(accepted, drafted=4, evidence=evidence, draft_ms=0.02, head_ms=0.0, slm_ms=0.0, **times)
    tree = hybrid_tree(rng)
    accepted = path_to(tree.parents, rng.choice([ROOT, *range(20)]))
    drawn = tuple(rng.random() > 0.2 for _ in accepted)
    evidence = _evidence(rng, tree.tokens, tree.parents, accepted, drawn)
    traffic = Traffic(212, 6000 + 400 * len(accepted), 480, 6400 + 400 * len(accepted))
    return round_trace(
        accepted, drawn=drawn, tree=tree, evidence=evidence, traffic=traffic,
        head_ms=4.2 * noise, slm_ms=7.4 * noise, draft_ms=12.9 * noise, commit_ms=0.7, **times,
    )  # fmt: skip


def _evidence(
    rng: random.Random, tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int], drawn: Sequence[bool]
) -> Evidence:
    draws, probs = [99] * (len(tokens) + 1), [rng.random() * 0.004 for _ in tokens]
    for row, was_drawn in zip(accepted, drawn, strict=True):
        probs[row] = 0.8 if was_drawn else 0.12
        draws[parents[row] + 1] = tokens[row] if was_drawn else 98
    return Evidence(list(tokens), list(parents), draws, probs, probs, [1.0] * len(draws))


def answers(system: str, count: int, rounds: int, seed: int = 7) -> list[GenerationTrace]:
    """Generations of `rounds` rounds each, the last of which ends the answer."""
    rng, made = random.Random(seed), []
    for number in range(count):
        found: list[RoundTrace] = []
        for index in range(1, rounds + 1):
            length = 5 + sum(len(record.tokens) for record in found)
            found.append(judged_round(rng, system, index, length))
        found[-1] = msgspec.structs.replace(found[-1], finished="stop")
        total = sum(record.draft_ms + record.wait_ms + record.commit_ms for record in found) + 20.0
        one = generation(
            *found, system=system, prompt_id=f"q{number}", total_ms=total, first_token_ms=rng.uniform(10, 30)
        )
        rule = Acceptance("epsilon", EPSILON) if system == "hyco" else Acceptance("exact", 1.0)
        made.append(msgspec.structs.replace(one, acceptance=rule))
    return made


def bench_folder(folder: Path, count: int = 4, rounds: int = 6, finished: bool = True) -> Path:
    """A benchmark of SYSTEMS with p~."""
    folder.mkdir(parents=True)
    traces = {system: answers(system, count, rounds) for system in SYSTEMS}
    for system, made in traces.items():
        write_traces(folder / f"{system}.jsonl", made)
    write_json(folder / "plan.json", plan(count))
    sizes = {system: (folder / f"{system}.jsonl").stat().st_size for system in SYSTEMS}
    write_json(folder / "progress.json", sizes)
    if finished:
        write_json(folder / "systems.json", figures(traces))
    return folder


def figures(traces: dict[str, list[GenerationTrace]]) -> list[Any]:
    return [measure(system, list(map(without_evidence, made)), KEEPSET) for system, made in traces.items()]


def plan(count: int) -> dict[str, Any]:
    return {
        "systems": SYSTEMS, "backend": "onnx-cpu", "prompts": [f"q{number}" for number in range(count)],
        "verifier": VERIFIER, "machine": "a test, 2 cores", "link": "lte", "server": "hyco-export 0.1.0",
        "clock": "thread-cpu", "drafting": {"chain_acceptance": 0.66},
    }  # fmt: skip


def evaluation_folder(folder: Path) -> Path:
    """The same with answers, scores and a summary; `hyco` failed at q3 and was judged at q0 alone."""
    bench_folder(folder, finished=False)
    traces = {system: answers(system, 4, 6) for system in SYSTEMS}
    rows = []
    for system, made in traces.items():
        for trace in made:
            row = {"system": system, "question": trace.prompt_id, "task": "qa", "turn": 1, "generation": 0}
            rows.append({**row, "prompt": f"What is {trace.prompt_id}?", "ids": trace.tokens, "failure": None})
    rows.append({"system": "hyco", "question": "q9", "task": "qa", "turn": 1, "generation": 0, "failure": "went away"})
    write_lines(folder / "answers.jsonl", rows)
    score = {
        "system": "hyco",
        "question": "q0",
        "turn": 1,
        "generation": 0,
        "metric": "judge",
        "value": 87.5,
        "reason": "",
    }
    write_lines(folder / "scores.jsonl", [score])
    contrast = {"baseline": "cloud-mtp", "system": "hyco", "pairs": 4, "exploratory": False}
    unsaved = {"generation": 0, "count": 1, "pairs": 4, "share": 0.25, "questions": ["q2"]}
    screened = {"baseline": "cloud-mtp", "system": "hyco", "question": "q1", "task": "qa"}
    summary = {
        "coverage": {"cloud-mtp": [4, 4], "hyco": [4, 5]},
        "systems": figures(traces),
        "quality": [
            {"system": "cloud-mtp", "task": "qa", "metric": "judge", "value": 90.6, "count": 4, "run_sd": 0.61},
            {"system": "hyco", "task": "qa", "metric": "judge", "value": 90.34, "count": 4, "run_sd": None},
        ],
        "contrasts": [
            {**contrast, "measure": "g", "task": "all", "estimate": -0.386, "low": -0.395, "high": -0.377},
            {**contrast, "measure": "judge", "task": "qa", "estimate": -0.26, "low": -1.2, "high": 0.8},
        ],
        "questions_without_saving": {"hyco": [unsaved]},
        "screen": [{**screened, "difference": -25.0, "scores": [65.0], "baseline_scores": [90.0]}],
    }  # fmt: skip
    write_json(folder / "summary.json", summary)
    return folder


def run_folder(root: Path) -> Path:
    """A run with a finished validation, whose traces were not kept, and a benchmark."""
    write_report(synthetic_report(), root / "validate")
    bench_folder(root / "bench")
    return root


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
