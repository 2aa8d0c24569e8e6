"""What a server samples from, against golden trees: are its logits right, does it cut and draw from them correctly,
and does it accept what the session's rule says?

A rule or draw by wrong probabilities commits wrong text at times and raises no error; greedy text, which only asks
which token is first, shows none of it. Sessions ask for Evidence, which holds the server's own probabilities and draws;
the first are compared with golden ones, the draws with golden draws of the same seeds, and the verdict with the one
that follows from the Evidence (`golden_rounds` asks).

Legend: N nodes of a golden tree, R rows that have children.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hyco_export.core.golden import GoldenTree
from hyco_export.device.interfaces import Transport
from hyco_export.evaluate.diagnosis.finding import Fault, Finding
from hyco_export.evaluate.diagnosis.golden_rounds import FEWEST_WRONG, NOISE_NATS, TINY, Answered, Asked, ask, centred
from hyco_export.protocol import wire

WHERE = "the server's probabilities"
EXACT_NATS = 0.01  # root mean square of errors of log p: another order of float32 sums gives 1e-4 and less
EXPLAINS = 0.5  # a hypothesis that leaves this share of the error
EDGE_NOISE = 4.0  # times that error: a node nearer to an edge may fall on either side of it
NEVER = 1e-3  # probability below which a correct server does not draw a token
UNLIKELY_SIGMAS = 5.0  # once in two million servers
LEAST_MARGIN = 2e-3  # of probability, by which a golden draw is clear of the next token whatever the order of sums
MARGIN_PER_NAT = 1.0  # errors of log p of root mean square E move no running sum of p by more than E / 2, were they all
# of one sign up to there and of the other behind it
WRONG_SHARE = 0.02  # of clear draws, where log p are noisy
CAPS = np.geomspace(2.0, 200.0, 400)  # soft-caps that are tried, 1 % apart
FACTORS = np.geomspace(0.1, 10.0, 400)  # of an output layer, 1 % apart
SERVED = "serve the checkpoint of $.models.verifier with the release that built the artifacts; if it stays, report it"


def distribution_findings(trees: Sequence[GoldenTree], transport: Transport, info: wire.ServerInfo) -> list[Finding]:
    """The first fault that the server's answers to all golden trees show.

    Raises:
        ServerError: the server cannot be reached.
    """
    asked = ask(trees, transport, info)
    if asked.malformed:
        return [Finding("hand-off", "the server", asked.malformed[0], SERVED)]
    return list(judge(asked))


def judge(asked: Asked) -> Iterator[Finding]:
    """The fault that the answers show, if any: of the logits, else of what is made of them."""
    answers = asked.answers
    if answers:
        error = _rms([answer.errors for answer in answers])
        fault = _raw_fault(answers, error)
        fault = fault or _cut_fault(answers, error) or _entropy_fault(answers, error)
        if fault is None and not asked.undrawn:
            fault = _draw_fault(answers) or _golden_draw_fault(asked) or _verdict_fault(answers)
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
    guesses = sorted(
        (_scaled(answers), _other_soft_cap(answers), _other_temperature(answers)), key=lambda guess: guess.fitted
    )
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


def _other_temperature(answers: Sequence[Answered]) -> _Guess:
    """Another temperature, by least squares: log p = slope x golden logits / T + a constant of each row."""
    slopes: dict[float, float] = {}
    for temperature in sorted({answer.golden.temperature for answer in answers}):
        chosen = [answer for answer in answers if answer.golden.temperature == temperature]
        x = np.concatenate([centred(np.array(each.tree.logits) / temperature, each.tree.parents) for each in chosen])
        y = np.concatenate([centred(each.log_probs, each.tree.parents) for each in chosen])
        slopes[temperature] = max(float(x @ y / max(x @ x, TINY)), TINY)
    left = _rms([each.left_by(slopes[each.golden.temperature] * np.array(each.tree.logits)) for each in answers])
    acts = ", ".join(f"{wanted:g} acts as {wanted / slope:.3g}" for wanted, slope in slopes.items())
    return _Guess("sampling", left, len(slopes), f"those of other temperatures: {acts}")


def _other_soft_cap(answers: Sequence[Answered]) -> _Guess:
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
    """After the cuts: which tokens are inside, and their probabilities."""
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


def _golden_draw_fault(asked: Asked) -> _Verdict | None:
    """Draws of the first token and at the rows, against those of the same seeds; near-ties are passed over."""
    error = max(_rms([answer.errors]) for answer in asked.answers)
    clear = [draw for draw in asked.draws if draw.margin > LEAST_MARGIN + MARGIN_PER_NAT * error]
    wrong = [draw for draw in clear if draw.token != draw.golden]
    if len(wrong) < max(FEWEST_WRONG, WRONG_SHARE * len(clear) if error > EXACT_NATS else 0):
        return None
    first = max(wrong, key=lambda draw: draw.margin)
    example = f"{first.where}: {first.token} instead of {first.golden}, {first.margin:.2f} away"
    seen = f"{len(wrong)} of {len(clear)} draws are not those of their seed, position and row ({example})"
    return _Verdict("sampling", f"{seen}; probabilities are right")


def _verdict_fault(answers: Sequence[Answered]) -> _Verdict | None:
    """What was accepted, against what follows from the evidence: exactly, for both are made of the same numbers."""
    wrong = [answer for answer in answers if answer.verdict != answer.right_verdict]
    if not wrong:
        return None
    by_rule = {rule: sum(answer.settings.rule == rule for answer in answers) for rule in _rules(wrong)}
    counts = ", ".join(
        f"{sum(answer.settings.rule == rule for answer in wrong)} of {total} rounds of the rule {rule}"
        for rule, total in by_rule.items()
    )
    first = wrong[0]
    example = f"rows {first.verdict.accepted}, tokens {first.verdict.tokens}"
    right = f"rows {first.right_verdict.accepted}, tokens {first.right_verdict.tokens}"
    return _Verdict("verdict", f"{counts} end otherwise than their evidence says (first: {example}, not {right})")


def _rules(answers: Sequence[Answered]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(answer.settings.rule for answer in answers))


def _left(answers: Sequence[Answered], logits: Callable[[GoldenTree], np.ndarray]) -> float:
    """Error that a hypothesis leaves of all log p."""
    return _rms([answer.left_by(logits(answer.tree)) for answer in answers])


def _rms(parts: Sequence[np.ndarray]) -> float:
    """Root mean square over all of them."""
    return float(np.sqrt(np.mean(np.concatenate(parts) ** 2)))
