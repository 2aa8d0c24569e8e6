"""What a server samples from, against golden trees: are its logits right, and does it cut and draw from them rightly?

A rule or draw by wrong probabilities commits wrong text at times and raises no error; greedy text, which only asks
which token is first, shows none of it. Sessions ask for Evidence, which holds the server's own probabilities.

Legend: N nodes of a golden tree, R rows that have children.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hyco_export.core.golden import GoldenDistribution, GoldenTree
from hyco_export.device.interfaces import Transport
from hyco_export.errors import ProtocolError
from hyco_export.evaluate.diagnosis.finding import Fault, Finding
from hyco_export.protocol import wire

WHERE = "the server's probabilities"
TRIES = 24  # seeds; a root of probability 1/2 is missed by all of them once in 17 million servers
EXACT_NATS = 0.01  # root mean square of errors of log p: another order of float32 sums gives 1e-4 and less
NOISE_NATS = 0.35  # logits of bfloat16 have steps of 1/8 beyond 16: the embedded family in it is 0.1 off
EXPLAINS = 0.5  # a hypothesis that leaves this share of the error
EDGE_NOISE = 4.0  # times that error: a node nearer to an edge may fall on either side of it
FEWEST_WRONG = 3  # nodes, or draws, on the wrong side
NEVER = 1e-3  # probability that a right server leaves for a token it draws
UNLIKELY_SIGMAS = 5.0  # once in two million servers
CAPS = np.geomspace(2.0, 200.0, 400)  # soft-caps that are tried, 1 % apart
FACTORS = np.geomspace(0.1, 10.0, 400)  # of an output layer, 1 % apart
TINY = float(np.finfo(np.float64).tiny)
SERVED = "serve the checkpoint of $.models.verifier with the release that built the artifacts; if it stays, report it"


@dataclass(frozen=True)
class Answered:
    """A golden tree as the server judged it under one sampling."""

    tree: GoldenTree
    golden: GoldenDistribution
    evidence: wire.Evidence

    @property
    def name(self) -> str:
        return f"T {self.golden.temperature:g}, top-k {self.golden.top_k}, top-p {self.golden.top_p:g}"

    @property
    def log_probs(self) -> np.ndarray:
        """log p [N], nothing cut."""
        return np.log(np.maximum(self.evidence.raw_probs, TINY))

    @property
    def errors(self) -> np.ndarray:
        """[N]: of log p."""
        return self.log_probs - np.array(self.golden.log_probs)

    def left_by(self, logits: np.ndarray) -> np.ndarray:
        """[N]: what these logits [N] do not explain of log p, up to a constant of each row."""
        return _centred(self.log_probs - logits / self.golden.temperature, self.tree.parents)


@dataclass
class Asked:
    """What came of all trees: answers, and why others are missing."""

    answers: list[Answered] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    undrawn: list[str] = field(default_factory=list)  # roots that no seed drew although they are likely


def distribution_findings(trees: Sequence[GoldenTree], transport: Transport) -> list[Finding]:
    """The first fault that the server's probabilities at all golden trees show.

    Raises:
        ServerError: the server cannot be reached.
    """
    asked = ask(trees, transport)
    if asked.malformed:
        return [Finding("hand-off", "the server", asked.malformed[0], SERVED)]
    return list(judge(asked))


def ask(trees: Sequence[GoldenTree], transport: Transport) -> Asked:
    """Every tree under every sampling."""
    asked = Asked()
    for tree in trees:
        for golden in tree.distributions:
            try:
                _ask_one(tree, golden, transport, asked)
            except ProtocolError as refusal:
                asked.malformed.append(f"a call was refused ({refusal.code}): {refusal.message}")
    return asked


def _ask_one(tree: GoldenTree, golden: GoldenDistribution, transport: Transport, asked: Asked) -> None:
    """Prime with one seed after the other until the tree's root is drawn, then send the tree."""
    for seed in range(TRIES):
        primed = transport.prime(_prime_request(tree, golden, seed))
        try:
            if primed.finished or primed.root != tree.root:
                continue
            committed = [*tree.prompt, tree.root]
            digest = wire.committed_digest(committed)
            body = wire.VerifyRequest(
                wire.PROTOCOL_VERSION, len(committed), digest, list(tree.tokens), list(tree.parents)
            )
            evidence = transport.verify(primed.session, 1, body).evidence
        finally:
            transport.close_session(primed.session)
        nodes = len(tree.tokens)
        if evidence is None:
            asked.malformed.append("a verify round brought no evidence although the session asked for it")
        elif [len(evidence.probs), len(evidence.raw_probs)] != [nodes] * 2 or len(evidence.entropies) != nodes + 1:
            asked.malformed.append(f"evidence of a tree of {nodes} nodes has values of {len(evidence.probs)}")
        else:
            asked.answers.append(Answered(tree, golden, evidence))
        return
    if (1 - golden.root_prob) ** TRIES < NEVER**2:
        asked.undrawn.append(f"a root of probability {golden.root_prob:.2f} is not drawn by {TRIES} seeds")


def _prime_request(tree: GoldenTree, golden: GoldenDistribution, seed: int) -> wire.PrimeRequest:
    return wire.PrimeRequest(
        version=wire.PROTOCOL_VERSION,
        prompt=list(tree.prompt),
        sampling=wire.Sampling(golden.temperature, golden.top_k, golden.top_p),
        acceptance=wire.EXACT,
        seed=seed,
        max_new_tokens=2,  # the root, and one by the only round
        draft_side="device",
        draft_steps=0,
        head_digest="",
        trace=True,
    )


def judge(asked: Asked) -> Iterator[Finding]:
    """The fault that the answers show, if any: of the logits, else of what is made of them."""
    answers = asked.answers
    if answers:
        error = _rms([answer.errors for answer in answers])
        fault = _raw_fault(answers, error)
        fault = fault or _cut_fault(answers, error) or _entropy_fault(answers, error) or _draw_fault(answers)
        if fault is not None:
            yield Finding(fault.fault, WHERE, fault.seen, fault.next)
            return
    if asked.undrawn:
        yield Finding("sampling", WHERE, asked.undrawn[0], SERVED)


@dataclass(frozen=True)
class _Verdict:
    fault: Fault
    seen: str
    next: str = SERVED


def _raw_fault(answers: Sequence[Answered], error: float) -> _Verdict | None:
    """Before any cut: None where log p are golden, or where nothing explains an error that rounding may be."""
    if error <= EXACT_NATS:
        return None
    as_wanted = _left(answers, lambda tree: np.array(tree.logits))
    seen = f"log p are {error:.2f} nats from the golden ones"
    guesses = sorted((_scaled(answers), _capped(answers), _heated(answers)), key=lambda guess: guess.fitted)
    least = min(guess.left for guess in guesses)
    if least < min(EXPLAINS * as_wanted, NOISE_NATS):
        best = next(guess for guess in guesses if guess.left <= least + EXACT_NATS)
        return _Verdict(best.fault, f"{seen}, {best.left:.2f} from {best.words}", best.next)
    if as_wanted < min(EXPLAINS * error, NOISE_NATS) and error > NOISE_NATS:
        return _Verdict("sampling", f"{seen}, but for a constant of each row {as_wanted:.2f}: they do not add up to 1")
    return _Verdict("logits", f"{seen}, and fit no scale and no soft-cap") if error > NOISE_NATS else None


@dataclass(frozen=True)
class _Guess:
    """A hypothesis in its best form, the error that it leaves, and how many numbers were fitted for that."""

    fault: Fault
    left: float
    fitted: int
    words: str
    next: str = SERVED


def _scaled(answers: Sequence[Answered]) -> _Guess:
    """Logits are too large or too small before the soft-cap, as of a scaled output layer."""
    own = answers[0].tree.soft_cap

    def logits(tree: GoldenTree, factor: float) -> np.ndarray:
        plain = factor * np.array(tree.plain_logits)
        return plain if own is None else own * np.tanh(plain / own)

    left = {float(factor): _left(answers, partial(logits, factor=factor)) for factor in FACTORS}
    best = min(left, key=lambda factor: left[factor])
    return _Guess("logits", left[best], 1, f"those of logits that are {best:.3g} times as large")


def _heated(answers: Sequence[Answered]) -> _Guess:
    """Another temperature, by least squares: log p = slope x golden logits / T + a constant of each row."""
    slopes: dict[float, float] = {}
    for temperature in sorted({answer.golden.temperature for answer in answers}):
        chosen = [answer for answer in answers if answer.golden.temperature == temperature]
        x = np.concatenate([_centred(np.array(each.tree.logits) / temperature, each.tree.parents) for each in chosen])
        y = np.concatenate([_centred(each.log_probs, each.tree.parents) for each in chosen])
        slopes[temperature] = max(float(x @ y / max(x @ x, TINY)), TINY)
    left = _rms([each.left_by(slopes[each.golden.temperature] * np.array(each.tree.logits)) for each in answers])
    acts = ", ".join(f"{wanted:g} acts as {wanted / slope:.3g}" for wanted, slope in slopes.items())
    return _Guess("sampling", left, len(slopes), f"those of other temperatures: {acts}")


def _capped(answers: Sequence[Answered]) -> _Guess:
    """Another soft-cap than the checkpoint's, or none."""
    own = answers[0].tree.soft_cap

    def logits(tree: GoldenTree, cap: float) -> np.ndarray:
        plain = np.array(tree.plain_logits)
        return plain if math.isinf(cap) else cap * np.tanh(plain / cap)

    left = {float(cap): _left(answers, partial(logits, cap=cap)) for cap in (math.inf, *CAPS)}
    least = min(left.values())
    best = next(cap for cap in left if left[cap] <= least + EXACT_NATS)  # a large cap is as good as none
    says = "none" if own is None else f"{own:g}"
    fits = "without a final soft-cap" if math.isinf(best) else f"with a final soft-cap of {best:.3g}"
    hint = f"give the server the checkpoint's config.json as it is: final_logit_softcapping is {says} there"
    fitted = int(math.isfinite(best))
    return _Guess("soft-cap", left[best], fitted, f"those of logits {fits}; the checkpoint's is {says}", hint)


def _cut_fault(answers: Sequence[Answered], error: float) -> _Verdict | None:
    """After the cuts: who is inside, and what is left for them."""
    margin = EXACT_NATS + EDGE_NOISE * error
    for name in dict.fromkeys(answer.name for answer in answers):
        chosen = [answer for answer in answers if answer.name == name]
        live, wanted, edges = (
            np.concatenate(each)
            for each in (
                [answer.evidence.probs for answer in chosen],
                [answer.golden.probs for answer in chosen],
                [answer.golden.edges for answer in chosen],
            )
        )
        clear = np.abs(edges) > margin
        stray, lost = clear & (live > 0) & (wanted == 0), clear & (live == 0) & (wanted > 0)
        if stray.sum() + lost.sum() >= FEWEST_WRONG:
            seen = f"with {name} {stray.sum()} nodes outside the cut have a probability and {lost.sum()} inside it none"
            return _Verdict("sampling", f"{seen}, of {len(live)}; before the cuts all are right")
        both = clear & (live > 0) & (wanted > 0)
        off = _rms([np.log(live[both]) - np.log(wanted[both])]) if both.any() else 0.0
        if off > max(NOISE_NATS if error > EXACT_NATS else 0.0, margin):
            seen = f"with {name} log p~ of the nodes inside the cut are {off:.2f} nats from the golden ones"
            return _Verdict("sampling", f"{seen}; before the cuts all are right")
    return None


def _entropy_fault(answers: Sequence[Answered], error: float) -> _Verdict | None:
    """H of every row whose logits are known."""
    off = [np.array(a.evidence.entropies)[list(a.tree.rows)] - np.array(a.golden.entropies) for a in answers]
    found = _rms(off)
    if found > max(EXACT_NATS, NOISE_NATS if error > EXACT_NATS else 0.0):
        seen = f"entropies are {found:.2f} nats from the golden ones, probabilities are right"
        return _Verdict("sampling", seen)
    return None


def _draw_fault(answers: Sequence[Answered]) -> _Verdict | None:
    """Draws at the rows whose distribution is known: none of a token that was cut, the likeliest as often as it is."""
    impossible = 0
    expected = variance = seen = 0.0
    for answer in answers:
        probs, parents = np.array(answer.evidence.probs), np.array(answer.tree.parents)
        for row in answer.tree.rows:
            children = {answer.tree.tokens[node]: probs[node] for node in np.flatnonzero(parents == row - 1)}
            drawn = answer.evidence.draws[row]
            if children.get(drawn, 1.0 - sum(children.values())) < NEVER:
                impossible += 1
            best = max(children, key=lambda token: children[token])
            expected += children[best]
            variance += children[best] * (1.0 - children[best])
            seen += drawn == best
    if impossible >= FEWEST_WRONG:
        return _Verdict("sampling", f"{impossible} draws are tokens that the server's own probabilities rule out")
    if abs(seen - expected) > max(FEWEST_WRONG, UNLIKELY_SIGMAS * math.sqrt(variance)):
        return _Verdict("sampling", f"the likeliest token is drawn {seen:g} times, by its probabilities {expected:.1f}")
    return None


def _left(answers: Sequence[Answered], logits: Callable[[GoldenTree], np.ndarray]) -> float:
    """Error that a hypothesis leaves of all log p."""
    return _rms([answer.left_by(logits(answer.tree)) for answer in answers])


def _centred(values: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """values [N] without the mean of their siblings."""
    groups = np.unique(parents, return_inverse=True)[1]
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]


def _rms(parts: Sequence[np.ndarray]) -> float:
    """Root mean square over all of them."""
    return float(np.sqrt(np.mean(np.concatenate(parts) ** 2)))
