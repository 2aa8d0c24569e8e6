"""What the device drafts at the golden roots: from golden hand-offs beside transformers' head, and from live ones.

Golden hand-offs go through the device's own host code; the feeds it makes are then given to the float network, whose
logits must be those of transformers' head, and to every back end's graph, whose ids must be its chain.

Legend: K steps, C kept tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from hyco_export.core.artifact import HEAD
from hyco_export.core.device_spec import HEAD_GRAPH, GraphSpec, to_real
from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import Golden, GoldenRoot, accepted_length
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, KvRows
from hyco_export.core.keepset import KeepSet
from hyco_export.core.network.head import logits_name
from hyco_export.core.numerics import EXACT_DB, sqnr_db
from hyco_export.device.backends import BACKENDS, open_head
from hyco_export.device.head import GraphHead
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.evaluate.backend_parity import NPU
from hyco_export.evaluate.connect import RunArtifacts
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.handoff_comparison import GoldenText
from hyco_export.evaluate.diagnosis.server_probe import PRIME, Seen
from hyco_export.models.head.static_pass import FloatHead, open_float_head
from hyco_export.protocol import wire

Feeds = Mapping[str, np.ndarray]
Outputs = Callable[[Feeds], dict[str, np.ndarray]]
TRUE_DB = 60.0  # float32 in another order gave 100 dB and more, a key too many in the sliding layers 45 and less
EMULATED_ROOTS = 4  # the emulator takes a second for one of the embedded family
EMULATED_BYTES = 100_000_000  # of a head.onnx: two minutes a root beyond it, and parity on saved feeds runs it anyway
LEAST_EQUAL = 0.85  # of ids: near-ties fall either way in integers
FEWEST_WRONG = 3  # fewer may be near-ties


class Recorder:
    """A `GraphSession`: keeps the newest feeds, answers with what `outputs` makes of them."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self.feeds: dict[str, np.ndarray] = {}

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        self.feeds = {name: np.array(values) for name, values in feeds.items()}  # rings are changed in place later
        return self._outputs(self.feeds)

    def close(self) -> None:
        """Nothing to release."""


def zeros(graph: GraphSpec) -> Outputs:
    """Outputs that are all 0."""
    return lambda _: {spec.name: np.zeros(spec.shape, spec.dtype) for spec in graph.outputs}


@dataclass(frozen=True)
class GoldenFeeds:
    """A root with what the host feeds the graph there, and the text's tokens after it."""

    root: GoldenRoot
    feeds: Feeds
    following: tuple[int, ...]


def golden_feeds(
    golden: Golden,
    texts: Sequence[GoldenText],
    ids: Sequence[Sequence[int]],
    encodings: Mapping[str, Encoding],
    artifacts: RunArtifacts,
) -> list[GoldenFeeds]:
    """Every golden root through the host's code, one hand-off for PRIME and one a round."""
    spec, made = artifacts.head, []
    recorder = Recorder(zeros(spec.graph))
    for session in golden.sessions:
        state = HeadState(GraphHead(spec, artifacts.keepset.ids, recorder), spec.handoff)
        before = 0
        for root in session.roots:
            position = root.position
            handoff = encoded(
                texts[session.text], max(before, position - spec.handoff.window), position, encodings, spec.handoff
            )
            committed = ids[session.text][: position + 1]
            if before:
                state.observe(committed, Given(handoff))
            else:
                state.begin(committed, Given(handoff))
            state.draft()
            following = tuple(ids[session.text][position + 1 : position + 1 + golden.steps])
            made.append(GoldenFeeds(root, recorder.feeds, following))
            before = position
    return made


def encoded(
    text: GoldenText, first: int, root: int, encodings: Mapping[str, Encoding], layout: HandoffSpec
) -> wire.Handoff:
    """A correct server's hand-off: rows first .. root - 1 in the graph's encodings."""

    def integers(name: str, chosen: slice) -> np.ndarray:
        return encodings[name].quantize(text[name][chosen])

    rows = slice(first, root)
    stores: list[dict[str, np.ndarray]] = [
        {
            kind: integers(f"{letter}.{kind}", rows).reshape(root - first, layout.kv[kind].heads, layout.kv[kind].dim)
            for kind in LAYER_TYPES
        }
        for letter in ("k", "v")
    ]
    e, h = integers("e", slice(root, root + 1)), integers("h", slice(root - 1, root))
    return wire.Handoff(e.tobytes(), h.tobytes(), layout.pack_rows(KvRows(*stores)), first)


def network_findings(feeds_of: Callable[[RunArtifacts], list[GoldenFeeds]], artifacts: RunArtifacts) -> list[Finding]:
    """The float network on the host's feeds against transformers' head, root by root.

    Where they differ, the head is fed with other spans: one that makes them equal is the right one.
    """
    head = open_float_head(artifacts.root)

    def wrong_roots(candidate: RunArtifacts) -> dict[int, float]:
        """By position, how far logits are from transformers' where they are too far."""
        inputs = candidate.head.graph.inputs
        quality = {
            each.root.position: _logits_db(
                each.root, _step_logits(head, to_real(inputs, each.feeds)), candidate.keepset
            )
            for each in feeds_of(candidate)
        }
        return {position: db for position, db in quality.items() if db < TRUE_DB}

    wrong = wrong_roots(artifacts)
    if not wrong:
        return []
    seen = f"logits are {min(wrong.values()):.0f} dB from those of transformers' head at {len(wrong)} golden positions"
    span = artifacts.head.spans["sliding"]
    for other in () if span is None else (span - 1, span + 1):
        spans: dict[str, int | None] = {**artifacts.head.spans, "sliding": other}
        if not wrong_roots(replace(artifacts, head=msgspec.structs.replace(artifacts.head, spans=spans))):
            seen = f"{seen}; with a span of {other} instead of {span} they are equal"
            hint = "build it again: hyco-export qat-head, then hyco-export compile; if it stays, report it"
            return [Finding("sliding window", "the device's head", seen, hint)]
    hint = "build them again: hyco-export qat-head, then hyco-export compile"
    return [Finding("weights", "the device's head", seen, hint)]


def _step_logits(head: "FloatHead", feeds: Feeds) -> list[np.ndarray]:
    """Logits [C] of every step."""
    seen: dict[str, np.ndarray] = {}
    head.draft(feeds, lambda name, values: seen.__setitem__(name, values.numpy()))
    return [seen[logits_name(step)][0] for step in range(1, head.network.steps + 1)]


def _logits_db(root: GoldenRoot, found: Sequence[np.ndarray], keepset: KeepSet) -> float:
    """How near to transformers' logits, over the steps whose inputs are the same in both."""
    wanted, given = [], []
    for step, logits in enumerate(found):
        rows = keepset.rows(np.array(root.top[step]))
        wanted.append(np.array(root.logits[step]))
        given.append(logits[rows])
        if int(keepset.ids[logits.argmax()]) != root.chain[step]:
            break
    return sqnr_db(np.concatenate(wanted), np.concatenate(given)) if wanted else EXACT_DB


def backend_findings(golden: Sequence[GoldenFeeds], artifacts: RunArtifacts, target: str) -> Iterator[Finding]:
    """Ids of every back end's graph on the golden feeds."""
    size = (artifacts.root / HEAD / f"{HEAD_GRAPH}.onnx").stat().st_size
    for name, backend in BACKENDS.items():
        if name == NPU and size > EMULATED_BYTES:
            continue
        chosen = golden[:: max(1, len(golden) // EMULATED_ROOTS)] if name == NPU else golden
        with closing(backend.head(artifacts.root, target)) as session:
            chains = [artifacts.keepset.ids[session.run(each.feeds)["chain"]] for each in chosen]
        pairs = [pair for chain, each in zip(chains, chosen, strict=True) for pair in _compared(chain, each.root.chain)]
        wrong = sum(found != wanted for found, wanted in pairs)
        if wrong >= FEWEST_WRONG and 1 - wrong / len(pairs) < LEAST_EQUAL:
            yield _backend_finding(name, 1 - wrong / len(pairs), pairs)


def _compared(chain: np.ndarray, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(found, wanted) up to the first difference: what follows was fed another token."""
    for found, right in zip(chain.tolist(), wanted, strict=True):
        yield found, right
        if found != right:
            return


def _backend_finding(name: str, share: float, pairs: Sequence[tuple[int, int]]) -> Finding:
    """Are wrong ids the right ones renamed, each always by the same other?"""
    where = f"the head on back end {name}"
    seen = f"{share:.0%} of the golden chain's ids are drafted, at least {LEAST_EQUAL:.0%} must be"
    names: dict[int, set[int]] = {}
    for found, wanted in pairs:
        names.setdefault(wanted, set()).add(found)
    often = [wanted for wanted in names if sum(each == wanted for _, each in pairs) > 1]
    if often and sum(len(names[wanted]) == 1 for wanted in often) > 0.9 * len(often):
        return Finding(
            "keep set", where, f"{seen}; a token is always drafted as the same other one", "hyco-export compile"
        )
    return Finding("weights", where, seen, "build it again: hyco-export convert-head, then hyco-export compile")


def live_acceptance(
    seen: Sequence[Seen], ids: Sequence[Sequence[int]], artifacts: RunArtifacts, backend: str, target: str, steps: int
) -> list[int]:
    """Accepted lengths of the device's chains, drafted from what the server sent."""
    lengths = []
    head = open_head(artifacts.root, backend, target)
    with closing(head):
        state = HeadState(head, artifacts.head.handoff)
        for one in seen:
            committed = ids[one.text][: one.root + 1]
            if one.call == PRIME:
                state.begin(committed, Given(one.handoff))
            else:
                state.observe(committed, Given(one.handoff))
            following = tuple(ids[one.text][one.root + 1 : one.root + 1 + steps])
            lengths.append(accepted_length(state.draft().chain, following))
    return lengths
