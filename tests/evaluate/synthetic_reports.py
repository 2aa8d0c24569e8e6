"""A synthetic report with everything in it, from seeded rounds of a plausible shape."""

import math
import random

import numpy as np

from hyco_export.core.keepset import KeepSet
from hyco_export.evaluate.backend_parity import GraphParity
from hyco_export.evaluate.diagnosis.finding import Diagnosis, Finding
from hyco_export.evaluate.gates import Difference, Gate, Losslessness
from hyco_export.evaluate.metrics import SystemTraffic, measure
from hyco_export.evaluate.pictures import median_times, pick_tree
from hyco_export.evaluate.report import Report
from hyco_export.protocol.tree import ROOT, Source, Tree, path_to
from hyco_export.protocol.wire import PAPER_SAMPLING, ServerInfo, Traffic
from tests.evaluate.synthetic_traces import generation, round_trace

VOCAB = 512
WORDS = (
    " the",
    " function",
    "(",
    ")",
    "\n",
    " returns",
    " list",
    " of",
    "_append",
    "import",
    " statistics",
    "한",
    "$x$",
)


def hybrid_tree(rng: random.Random) -> Tree:
    """Four chain nodes, two runner-ups, 26 SLM leaves under them."""
    tokens, parents = [*range(10, 14)], [ROOT, 0, 1, 2]
    sources = [Source.CHAIN] * 4 + [Source.RUNNER_UP] * 2
    tokens += [20, 21]
    parents += [ROOT, 0]
    for leaf in range(26):
        tokens.append(100 + leaf)
        parents.append(rng.choice([ROOT, 0, 0, 1, 2, 3, 4, 5]))
        sources.append(Source.SLM)
    return Tree(tuple(tokens), tuple(parents), (-1.0,) * 32, tuple(sources))


def seeded_rounds(rng: random.Random, system: str):
    rounds = []
    length = 5
    for number in range(1, 9):
        noise = rng.uniform(0.8, 1.2)
        times = {"length": length, "server_ms": 6.3 * noise, "wait_ms": 9.1 * noise}
        if system == "cloud-mtp":
            accepted = tuple(range(rng.choice([0, 0, 1, 1, 2, 4])))
            record = round_trace(accepted, drafted=4, number=number, head_ms=0.0, slm_ms=0.0, draft_ms=0.02, **times)
        else:
            tree = hybrid_tree(rng)
            leaf = rng.choice([ROOT, 0, 1, 2, 3, 4, 5, *range(6, 20)])
            accepted = path_to(tree.parents, leaf)
            drawn = tuple(system != "hyco" or rng.random() > 0.2 for _ in accepted)
            traffic = Traffic(212, 5632 + 6144 * (len(accepted) + 1) + 61, 480, 9000)
            record = round_trace(
                accepted, drawn=drawn, tree=tree, number=number, traffic=traffic,
                head_ms=4.2 * noise, slm_ms=7.4 * noise, draft_ms=12.9 * noise, commit_ms=0.7, **times,
            )  # fmt: skip
        length += len(record.tokens)
        rounds.append(record)
    return rounds


SWAPPED_NORM = Finding(
    "norm side", "the server", "h arrives from before the final norm (41 dB so explained)", "make the two one"
)


def synthetic_report(failing: bool = False, findings: tuple[Finding, ...] = ()) -> Report:
    rng = random.Random(7)
    keepset = KeepSet(np.arange(0, VOCAB, 2), VOCAB)
    traces = {
        system: [generation(*seeded_rounds(rng, system), system=system, prompt_id=f"p{i}") for i in range(4)]
        for system in ("cloud-mtp", "hyco-exact", "hyco")
    }
    differences = (Difference("p3", 17, 5, 6),) if failing else ()
    return Report(
        run="runs/tiny",
        recipe="tiny",
        target="sm8850",
        url="http://127.0.0.1:8411",
        started_at="2026-11-30T01:15:58+00:00",
        duration_s=143.2,
        version="0.1.0",
        server=ServerInfo(
            1,
            "hyco-export 0.1.0",
            "a" * 64,
            "b" * 64,
            VOCAB,
            [1],
            "c" * 64,
            "d" * 64,
            64,
            4096,
            4,
            ["exact"],
            "thread-cpu",
        ),
        sampling=PAPER_SAMPLING,
        epsilon=0.005,
        max_new_tokens=64,
        chain_acceptance=0.66,
        backend="onnx-cpu",
        systems=tuple(measure(system, found, keepset) for system, found in traces.items()),
        losslessness=(
            Losslessness("hyco-exact", "torch", 30, 64, 1920, 2.61, ()),
            Losslessness("hyco-exact", "onnx-cpu", 30, 64, 1920, 2.58, differences),
            Losslessness("hyco-exact", "qnn", 4, 32, 128, 2.55, ()),
        ),
        parity=(
            GraphParity("head", "torch", "onnx-cpu", 384, 0.991, (1.0, 0.99, 0.98, 0.99, 1.0, 0.98)),
            GraphParity("head", "torch", "qnn", 96, 0.984, (1.0, 0.98, 0.98, 0.97, 1.0, 0.98)),
            GraphParity("slm_tree", "torch", "onnx-cpu", 512, 0.978, (), 0.0012, 41.2, 0.011),
            GraphParity("slm_tree", "onnx-cpu", "qnn", 128, 0.999, (), 2e-6, 62.0, 0.0021),
        ),
        traffic=tuple(SystemTraffic(system, 212, 30000, 61) for system in traces),
        diagnosis=Diagnosis(32, (0.81, 0.62), (0.81, 0.59), findings),
        gates=(
            Gate("greedy texts that differ, hyco-exact on onnx-cpu", len(differences), "at most", 0),
            Gate("head agreement, qnn against torch", 0.984, "at least", 0.97),
            Gate("MAT of hyco", math.nan if failing else 2.4, "at least", 1.8),
            Gate("bytes up a round", 212, "at most", 300, "B"),
        ),
        times=tuple(median_times(system, found) for system, found in traces.items()),
        tree=pick_tree(traces["hyco"], lambda token: WORDS[token % len(WORDS)]),
        notes=("The emulator ran 4 prompts of 32 tokens: it computes every pass on this machine's cores.",),
    )
