"""The recorded rounds as the page's viewer reads them, with their texts: columns by answer, gzipped and in base64.

An answer's steps are its calls and local commits in time order. 5,000 rounds of 32 nodes are about 1.1 MB of text.
"""

import base64
import gzip
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from hyco_export.device.systems import find_system
from hyco_export.errors import HycoError
from hyco_export.evaluate.metrics import evidence_bytes
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.texts import Texts
from hyco_export.evaluate.quality.evaluation_folder import Answer, Place, Score
from hyco_export.evaluate.runs import prompt_seed
from hyco_export.protocol.trace import GenerationTrace, LocalTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.tree import Source as Drafter

Step = PrimeTrace | RoundTrace | LocalTrace
VIEWER = "#rounds"  # the page's address of its viewer
PRIME, ROUND, LOCAL = "prime", "round", "local"
MOST_ROUNDS = 20_000  # of 32 nodes: about 4.5 MB of a page
MS_DIGITS = 3  # behind the point
PROBABILITY_DIGITS = 4  # significant ones


def packed(data: Mapping[str, Any]) -> str:
    """As it stands in the page: base64 of gzipped JSON, the same for the same data."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(data), mtime=0)).decode()


def address(*places: object) -> str:
    """Where the viewer shows a source's name, a system, a prompt, a seed, a step: as many as are known."""
    return "/".join((VIEWER, *(quote(str(place), safe="") for place in places)))


def every_nth(sources: Sequence[Source], most: int) -> int:
    """Which answers a page of about so many rounds holds: every one, every second, ... of a system."""
    return max(1, math.ceil(sum(source.rounds for source in sources) / most))


def viewer_data(sources: Sequence[Source], texts: Texts, most: int = MOST_ROUNDS) -> dict[str, Any]:
    """Everything that the viewer shows; `texts` are by token id. Beyond `most` rounds it holds every n-th answer."""
    seen: set[int] = set()
    every = every_nth(sources, most)
    shown = [_source(source, texts, seen, every) for source in sources if source.traces]
    return {"known": texts.known, "every": every, "texts": texts.of_ids(seen) if texts.known else {}, "sources": shown}


def _source(source: Source, texts: Texts, seen: set[int], every: int) -> dict[str, Any]:
    names = [system.system for system in source.systems if system.system in source.traces]
    told = _Told(source, texts)
    return {
        "name": source.name,
        "systems": [
            {
                "name": name,
                "means": _meaning(name),
                "answers": [_answer(trace, told, texts, seen) for trace in source.traces[name][::every]],
                "failures": told.failures(name),
            }
            for name in names
        ],
    }


def _meaning(system: str) -> str:
    try:
        return find_system(system).summary
    except HycoError:  # of a release that knew another system
        return ""


class _Told:
    """What an evaluation says of the answers of its traces, and the texts of prompts."""

    def __init__(self, source: Source, texts: Texts) -> None:
        evaluation = source.evaluation
        answers = evaluation.answers if evaluation else ()
        self._seeds = source.plan.get("seeds", ())  # by generation
        self._failed = evaluation.failures if evaluation else ()
        self._prompts = {answer.place.prompt_id: answer.prompt for answer in answers}
        self._answers: dict[tuple[str, str, tuple[int, ...]], list[Answer]] = {}
        for answer in answers:
            self._answers.setdefault((answer.system, answer.place.prompt_id, answer.ids), []).append(answer)
        self._scores: dict[Place, list[Score]] = {}
        self._texts = texts
        for score in evaluation.scores if evaluation else ():
            self._scores.setdefault(score.place, []).append(score)

    def prompt(self, prompt_id: str) -> str:
        return self._prompts.get(prompt_id) or self._texts.prompt(prompt_id)

    def of(self, trace: GenerationTrace) -> dict[str, Any]:
        """Task, generation and scores of the answer that has these ids; nothing outside an evaluation."""
        same = self._answers.get((trace.system, trace.prompt_id, trace.tokens))
        if same is None:
            return {}
        answer = next((one for one in same if self._seed(one) == trace.seed), same[0])
        found = [[one.metric, one.value, one.reason] for one in self._scores.get(answer.place, [])]
        return {"task": answer.task, "generation": answer.generation, "scores": found}

    def _seed(self, answer: Answer) -> int | None:
        """Which tells generations with the same ids apart."""
        if answer.generation >= len(self._seeds):
            return None
        return prompt_seed(self._seeds[answer.generation], answer.place.prompt_id)

    def failures(self, system: str) -> list[list[str]]:
        """Generations without an answer: prompt and reason."""
        return [[one.place.prompt_id, one.failure or ""] for one in self._failed if one.system == system]


def _answer(trace: GenerationTrace, told: _Told, texts: Texts, seen: set[int]) -> dict[str, Any]:
    steps: list[Step] = sorted((*trace.primes, *trace.rounds, *trace.locals), key=lambda step: step.start_ms)
    seen.update(trace.tokens)
    for step in steps:
        if not isinstance(step, PrimeTrace):
            seen.update(step.tree.tokens)
        if isinstance(step, RoundTrace) and step.evidence is not None:
            seen.update(step.evidence.tokens, step.evidence.draws)
    rule = {} if not trace.rounds else {"rule": trace.acceptance.rule, "epsilon": trace.acceptance.epsilon}
    return {
        "id": trace.prompt_id,
        "seed": trace.seed,
        "prompt": told.prompt(trace.prompt_id),
        "length": trace.prompt_length,
        "tokens": trace.tokens,
        **({"pieces": texts.pieces(trace.tokens)} if texts.known else {}),
        "end": trace.finished,
        "ms": _ms(trace.total_ms),
        "first_ms": _ms(trace.first_token_ms),
        **rule,
        **told.of(trace),
        "steps": _columns(steps),
    }


def _columns(steps: Sequence[Step]) -> dict[str, Any]:
    """One list a field, with one value for every step."""

    def times(name: str) -> list[float]:
        return [_ms(getattr(step, name, 0.0)) for step in steps]

    extra = [evidence_bytes(step) if isinstance(step, RoundTrace) else 0 for step in steps]

    def sent(name: str) -> list[int]:
        return [0 if isinstance(step, LocalTrace) else getattr(step.traffic, name) for step in steps]

    def received(name: str) -> list[int]:
        return [whole - without for whole, without in zip(sent(name), extra, strict=True)]

    def each(of: Callable[[Step], Any]) -> list[Any]:
        return [of(step) for step in steps]

    return {
        "kind": each(_kind),
        "round": each(lambda step: step.round if isinstance(step, RoundTrace) else 0),
        "committed": each(lambda step: 1 if isinstance(step, PrimeTrace) else len(step.tokens)),
        "kept": each(lambda step: len(step.kept) if isinstance(step, RoundTrace) else 0),
        "reused": each(lambda step: getattr(step, "reused", 0)),
        **{
            name: times(f"{name}_ms")
            for name in ("start", "head", "slm", "draft", "ahead", "wait", "prefill", "server", "commit")
        },
        "up": sent("payload_up_bytes"),
        "down": received("payload_down_bytes"),
        "wire_up": sent("wire_up_bytes"),
        "wire_down": received("wire_down_bytes"),
        "lost": each(lambda step: getattr(step, "lost_ms", None)),
        "accepted": each(_accepted),
        "drawn": each(lambda step: [int(one) for one in step.drawn] if isinstance(step, RoundTrace) else []),
        **_trees(steps),
    }


def _kind(step: Step) -> str:
    return PRIME if isinstance(step, PrimeTrace) else ROUND if isinstance(step, RoundTrace) else LOCAL


def _accepted(step: Step) -> Sequence[int]:
    """Rows of the tree that were committed; a stop token or the cap may have cut the accepted path."""
    if isinstance(step, RoundTrace):
        return step.accepted[: len(step.tokens)]
    return step.kept if isinstance(step, LocalTrace) else ()


def _trees(steps: Iterable[Step]) -> dict[str, Any]:
    """The nodes that were judged: the device's tree, or the chain that the server drafted itself."""
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "parents", "sources", "scores", "probs", "draws")}
    for step in steps:
        tree = None if isinstance(step, PrimeTrace) else step.tree
        evidence = step.evidence if isinstance(step, RoundTrace) else None
        drafted = isinstance(step, RoundTrace) and step.drafted > 0
        nodes = evidence if evidence is not None and drafted else tree
        columns["tokens"].append(nodes.tokens if nodes else ())
        columns["parents"].append(nodes.parents if nodes else ())
        chain = (int(Drafter.CHAIN),) * (len(evidence.tokens) if evidence and drafted else 0)
        columns["sources"].append(chain or tuple(int(one) for one in (tree.sources if tree else ())))
        columns["scores"].append([round(one, MS_DIGITS) for one in (tree.log_probs if tree else ())])
        columns["probs"].append([_probability(one) for one in evidence.probs] if evidence else [])
        columns["draws"].append(evidence.draws if evidence else [])
    return columns


def _ms(value: float) -> float:
    return round(value, MS_DIGITS)


def _probability(value: float) -> float:
    return float(f"{value:.{PROBABILITY_DIGITS}g}")
