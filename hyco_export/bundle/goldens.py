"""Golden vectors: passes of the three graphs with their inputs and outputs, and whole recorded conversations.

The device's own host code drafts, over the integer graphs on the CPU; a scripted server answers with hand-offs from
the captured texts of `convert-head` and with verdicts that lead through every branch: along the text, beside the chain,
to an SLM leaf, past the rings' ends. What it is asked and answers is kept as it travels, and every pass becomes a
golden vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hyco_export.bundle.graphs import assemble_device
from hyco_export.bundle.raw_files import write_raw
from hyco_export.bundle.scripted_server import ROUNDS, ScriptedServer, read_text
from hyco_export.bundle.spec import ALTERED, EMULATOR, INTEGER, Bundle, Case, Session, Tensor, Tolerance, load_arrays
from hyco_export.core.artifact import HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE, PartialBuild
from hyco_export.core.device_spec import GraphSession, GraphSpec
from hyco_export.core.golden import read_samples
from hyco_export.core.keepset import read_keepset
from hyco_export.device.driver import generate
from hyco_export.device.systems import Settings, find_system, make_drafter, make_request

Arrays = Mapping[str, np.ndarray]
SessionOf = Callable[[str], GraphSession]
Alter = Callable[[Arrays], dict[str, np.ndarray]]
HYCO = find_system("hyco")
HEAD_CASES = 32
SLM_CASES = 4  # of calibration text, beside the passes of the sessions
NEW_TOKENS = 256  # asked for; the last verdict ends with a stop id long before
SEED = 20261011
LONGEST_ROUND = 64  # positions that a round can commit, at most: a server's limit of nodes
TOLERANCE_MARGIN = 1.25
FAR = 4000  # a position at which angles in float32 and in float64 may differ by steps
EDGE_ROUNDS = ("text", "sibling", "leaf", "text")
STOP_STEP, TIED_LEVELS = 1, 4096  # of the altered session: where its chain stops; neighbouring logits become equal
BUDGET_S = 120  # of the emulator, for the vectors of one graph
WEIGHTS_PER_S = 8_000_000  # the emulator's speed on two cores
WEIGHTS_PER_BYTE = 2  # of a binary: 4-bit weights


class Recorder:
    """Writes passes as golden vectors below a folder, in the order in which they are made.

    Args:
        folder: the bundle's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cases: list[Case] = []

    def record(self, name: str, graph: str, what: str, feeds: Arrays, outputs: Arrays, origin: str = INTEGER) -> None:
        """Keep one pass."""
        rows = rows_in_use(feeds) if "embeds" in feeds else None
        inputs = write_raw(self._folder, f"golden/{name}/inputs", feeds)
        made = write_raw(self._folder, f"golden/{name}/{origin.replace(' ', '_')}", outputs)
        self.cases.append(Case(name, graph, what, rows, inputs, {origin: made}))


class RecordedGraph:
    """A `GraphSession` whose passes are recorded; `prefix` begins their names, `alter` changes outputs before."""

    def __init__(
        self, graph: str, session: GraphSession, recorder: Recorder, prefix: str, alter: Alter | None = None
    ) -> None:
        self._graph, self._session, self._recorder, self._prefix = graph, session, recorder, prefix
        self._alter = alter

    def run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        outputs, origin = self._session.run(feeds), INTEGER
        if self._alter is not None:
            outputs, origin = self._alter(outputs), ALTERED
        number = sum(case.id.startswith(f"{self._prefix}-") for case in self._recorder.cases)
        name = f"{self._prefix}-{number:02}-{self._graph}"
        self._recorder.record(name, self._graph, f"pass {number} of session {self._prefix}", feeds, outputs, origin)
        return outputs

    def close(self) -> None:
        self._session.close()


def rows_in_use(feeds: Arrays) -> int:
    """Rows of an SLM pass that are no padding: those before the last ones that see themselves alone."""
    masks = next(values for name, values in feeds.items() if name.startswith("mask."))  # [R, W + R]
    seen = (masks == masks.max()).sum(axis=1)
    return max(1, len(seen) - int(np.argmax(seen[::-1] > 1))) if (seen > 1).any() else 1


class Plan(NamedTuple):
    """A session to record. `first_rows`: K/V rows of the first reply, 0 is all; `altered`: outputs are changed."""

    id: str
    start: int  # ids of the prompt
    first_rows: int
    what: str
    rounds: Sequence[str] = ROUNDS
    altered: bool = False


@dataclass
class Goldens:
    """What was recorded. `host_cases`: passes whose outputs were altered."""

    cases: list[Case] = field(default_factory=list)
    host_cases: list[Case] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)


def record_goldens(
    run: Path,
    folder: Path,
    bundle: Bundle,
    settings: Settings,
    open_graph: SessionOf,
    on_step: Callable[[int, int], None],
) -> Goldens:
    """Passes on stored samples, then sessions, all on the integer graphs.

    Args:
        run: the run's folder.
        folder: the bundle's.
        bundle: what is known of it already.
        settings: drafting options of the run.
        open_graph: a session of the integer graph with a name.
        on_step: sessions done, of how many.
    """
    recorder = Recorder(folder)
    graphs = {name: open_graph(name) for name in bundle.graphs}
    for path, limit in ((run / HEAD / HEAD_SAMPLES_FILE, HEAD_CASES), (run / SLM / SLM_SAMPLES_FILE, SLM_CASES)):
        for graph, feeds in read_samples(path).items():
            for number, feed in enumerate(feeds[:limit]):
                what = "sample of captured text"
                recorder.record(f"{graph}-{number:02}", graph, what, feed, graphs[graph].run(feed))
    plans, apart = session_plans(bundle), Recorder(folder)
    result = Goldens(recorder.cases, apart.cases)
    length = max(plan.start for plan in plans) + (len(ROUNDS) + 1) * LONGEST_ROUND
    text = read_text(run / HEAD, bundle.head_spec.handoff, length, frozenset(bundle.stop_ids))
    stop = next(iter(bundle.stop_ids), None)
    for done, plan in enumerate(plans):
        on_step(done, len(plans))
        kept = apart if plan.altered else recorder
        first = len(kept.cases)
        server = ScriptedServer(text, bundle.head_spec.handoff, stop, _keeper(folder, plan.id), plan.rounds)
        alter = _altering(folder, bundle, stop) if plan.altered else None
        recorded = {name: RecordedGraph(name, graph, kept, plan.id, alter) for name, graph in graphs.items()}
        device = assemble_device(folder, bundle, recorded)
        request = make_request(HYCO, settings, plan.id, bundle.server.sampling, SEED, NEW_TOKENS)
        request = msgspec.structs.replace(request, first_rows=plan.first_rows)
        generate(text.ids[: plan.start], request, make_drafter(HYCO, settings, device), server)
        calls = tuple(case.id for case in kept.cases[first:])
        result.sessions.append(Session(plan.id, plan.what, calls, tuple(server.exchanges)))
    on_step(len(plans), len(plans))
    return result


def session_plans(bundle: Bundle) -> tuple[Plan, ...]:
    """Where the sessions begin."""
    window = bundle.head_spec.handoff.window
    rings = bundle.slm_spec.rings.values()
    smallest, largest = min(window, *rings), max(window, *rings)
    late = "every ring has wrapped, and the first window comes in parts"
    edges = "far on; outputs are altered: chains with a stop token, runner-ups equal to the chain, equal logits"
    return (
        Plan("before", smallest // 2 + 3, 0, "begins before any ring is full"),
        Plan("across", largest - 3, 0, "its rounds cross the end of the largest ring"),
        Plan("after", largest + largest // 2, max(1, window // 4), late),
        Plan("edges", max(FAR, largest), 0, edges, EDGE_ROUNDS, altered=True),
    )


def _altering(folder: Path, bundle: Bundle, stop: int | None) -> Alter:
    """Outputs with what graphs rarely give: every second chain has the stop token, where it is kept, as its second
    token; each first runner-up is the chain's first token; neighbouring logits are equal."""
    kept = read_keepset((folder / bundle.keepset).parent).ids
    rows = np.flatnonzero(kept == stop)  # one, or none
    drafts = count()

    def alter(outputs: Arrays) -> dict[str, np.ndarray]:
        changed = {name: values.copy() for name, values in outputs.items()}
        if "chain" in changed:
            if len(rows) and len(changed["chain"]) > STOP_STEP and next(drafts) % 2 == 0:
                changed["chain"][STOP_STEP] = rows[0]
            if changed.get("runner_up", np.empty(0)).size:
                changed["runner_up"][0] = changed["chain"][0]
        if "logits" in changed:
            changed["logits"] -= changed["logits"] % TIED_LEVELS
        return changed

    return alter


def emulate(
    folder: Path,
    cases: list[Case],
    graphs: Mapping[str, GraphSpec],
    open_graph: SessionOf,
    on_step: Callable[[int, int], None],
) -> list[Case]:
    """`cases` with the emulator's outputs too, as many of each graph as its time allows, evenly spread.

    A build that was killed goes on with the case that it was at. One graph is open at a time.
    """
    done, partial = {case.id: case for case in cases}, PartialBuild(folder)
    chosen = {graph: _affordable(folder, cases, graph) for graph in dict.fromkeys(case.graph for case in cases)}
    number, total = count(), sum(map(len, chosen.values()))
    for graph, own in chosen.items():
        session: GraphSession | None = None
        try:
            for case in own:
                on_step(next(number), total)
                paths = {name: f"golden/{case.id}/{EMULATOR}/{name}.raw" for name in case.outputs[INTEGER]}
                if partial.finished(case.id) is None:
                    session = session or open_graph(graph)
                    outputs = session.run(load_arrays(folder, case.inputs, graphs[graph].inputs))
                    write_raw(folder, f"golden/{case.id}/{EMULATOR}", outputs)
                    partial.finish(case.id, list(paths.values()))
                done[case.id] = msgspec.structs.replace(case, outputs={**case.outputs, EMULATOR: paths})
        finally:
            if session is not None:
                session.close()
    on_step(total, total)
    return list(done.values())


def _affordable(folder: Path, cases: list[Case], graph: str) -> list[Case]:
    own = [case for case in cases if case.graph == graph]
    weights = (folder / graph / f"{graph}.bin").stat().st_size * WEIGHTS_PER_BYTE
    affordable = min(len(own), max(1, BUDGET_S * WEIGHTS_PER_S // weights))
    return [own[place] for place in np.linspace(0, len(own) - 1, affordable).round().astype(int)]


def with_tolerances(folder: Path, bundle: Bundle) -> Bundle:
    """The bundle with `tolerance_steps` at every real output.

    A step, or the recipe's share of the output's range; more where emulator and integer graph, both right, were seen to
    differ by more: what all but `outside_share` of a vector's elements keep, with a margin.
    """
    graphs = {}
    for name, graph in bundle.graphs.items():
        cases = [case for case in bundle.cases if case.graph == name]
        outputs = tuple(
            tensor
            if tensor.scale is None
            else msgspec.structs.replace(tensor, tolerance_steps=_steps(folder, bundle.tolerance, tensor, cases))
            for tensor in graph.outputs
        )
        graphs[name] = msgspec.structs.replace(graph, outputs=outputs)
    return msgspec.structs.replace(bundle, graphs=graphs)


def _steps(folder: Path, tolerance: Tolerance, tensor: Tensor, cases: list[Case]) -> int:
    lows, highs, seen = [], [], [1.0]  # in steps
    for case in cases:
        levels = {
            origin: tensor.in_use(load_arrays(folder, paths, [tensor.spec])[tensor.name], case.rows).astype(np.int64)
            for origin, paths in case.outputs.items()
        }
        lows.append(levels[INTEGER].min())
        highs.append(levels[INTEGER].max())
        if EMULATOR in levels:
            off = np.abs(levels[INTEGER] - levels[EMULATOR])
            seen.append(TOLERANCE_MARGIN * float(np.quantile(off, 1 - tolerance.outside_share, method="higher")))
    return ceil(max(*seen, tolerance.range_share * float(max(highs) - min(lows))))


def _keeper(folder: Path, session: str) -> Callable[[str, bytes], str]:
    place = folder / "golden" / f"session-{session}"
    place.mkdir(parents=True, exist_ok=True)

    def keep(name: str, body: bytes) -> str:
        (place / f"{name}.msgpack").write_bytes(body)
        return f"golden/session-{session}/{name}.msgpack"

    return keep
