"""Sends golden trees to a server, under every sampling and acceptance rule, and keeps what it answers; judges nothing.

Sessions ask for Evidence. Their seeds draw the tree's root, so that the tree can be sent at once.

Legend: N nodes of a golden tree, R rows that have children.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from hyco_export.core.golden import GoldenDistribution, GoldenDraw, GoldenTree
from hyco_export.device.interfaces import Transport
from hyco_export.errors import ProtocolError
from hyco_export.evaluate.diagnosis.verdicts import Setting, Verdict, read_verdict, settings_for
from hyco_export.protocol import wire

ROUNDS = 8  # of a tree under a sampling, each with another seed: texts are mostly sure, and few draws lie near an edge
BEYOND_TREE = 2  # tokens of a session: its root, and the bonus below the deepest node
NOISE_NATS = 0.35  # logits of bfloat16 have steps of 1/8 beyond 16: the embedded family in it is 0.1 off
FEWEST_WRONG = 3  # nodes, or draws, on the wrong side
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Answered:
    """A golden tree as the server judged it under one sampling."""

    tree: GoldenTree
    golden: GoldenDistribution
    draw: GoldenDraw
    evidence: wire.Evidence
    settings: wire.Acceptance
    verdict: Verdict
    right_verdict: Verdict  # by this evidence

    @property
    def name(self) -> str:
        return sampling_name(self.golden)

    @property
    def log_probs(self) -> np.ndarray:
        """log p [N], nothing cut."""
        return np.log(np.maximum(self.evidence.raw_probs, TINY))

    @property
    def errors(self) -> np.ndarray:
        """[N]: of log p."""
        errors: np.ndarray = self.log_probs - np.array(self.golden.log_probs)
        return errors

    def left_by(self, logits: np.ndarray) -> np.ndarray:
        """[N]: what these logits [N] do not explain of log p, up to a constant of each row."""
        return centred(self.log_probs - logits / self.golden.temperature, self.tree.parents)


@dataclass(frozen=True)
class Drawn:
    """A draw beside the golden one, which is `margin` of probability away from any other token."""

    where: str
    token: int
    golden: int
    margin: float


@dataclass
class Asked:
    """Results of all trees: answers, draws, and why others are missing."""

    answers: list[Answered] = field(default_factory=list)
    draws: list[Drawn] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    undrawn: list[str] = field(default_factory=list)  # roots that no seed drew although they are likely


def ask(trees: Sequence[GoldenTree], transport: Transport, info: wire.ServerInfo) -> Asked:
    """Every tree under every sampling; the rules that the server knows take turns."""
    asked = Asked()
    settings = cycle(settings_for(info.rules) or settings_for([wire.EXACT.rule]))
    for tree in trees:
        for golden in tree.distributions:
            try:
                _ask_one(tree, golden, transport, info, settings, asked)
            except ProtocolError as refusal:
                asked.malformed.append(f"a call was refused ({refusal.code}): {refusal.message}")
    return asked


def _ask_one(
    tree: GoldenTree,
    golden: GoldenDistribution,
    transport: Transport,
    info: wire.ServerInfo,
    settings: Iterator[Setting],
    asked: Asked,
) -> None:
    """Prime with seeds that draw the tree's root, then send the tree, until that was done a few times."""
    rounds = 0
    for draw in golden.draws:
        if rounds == ROUNDS:
            return
        request = _prime_request(tree, golden, draw.seed, next(settings)(golden), info.context_limit)
        primed = transport.prime(request)
        try:
            where = f"{sampling_name(golden)}, seed {draw.seed}, the first token"
            asked.draws.append(Drawn(where, primed.root, tree.root, draw.root_margin))
            if primed.finished or primed.root != tree.root:
                continue
            committed = [*tree.prompt, tree.root]
            digest = wire.committed_digest(committed)
            body = wire.VerifyRequest(
                wire.PROTOCOL_VERSION, len(committed), digest, list(tree.tokens), list(tree.parents)
            )
            reply = transport.verify(primed.session, 1, body)
        finally:
            transport.close_session(primed.session)
        rounds += 1
        if malformed := _malformed(tree, reply.evidence):
            asked.malformed.append(malformed)
        elif reply.evidence is not None:
            right = read_verdict(reply.evidence, request.acceptance, info.stop_ids, request.max_new_tokens - 1)
            asked.answers.append(
                Answered(tree, golden, draw, reply.evidence, request.acceptance, Verdict.of(reply), right)
            )
            asked.draws += _drawn(asked.answers[-1])
    if not rounds and sum(draw.root_margin > NOISE_NATS for draw in golden.draws) >= FEWEST_WRONG:
        asked.undrawn.append(
            f"a root of probability {golden.root_prob:.2f} is not drawn by {len(golden.draws)} seeds that draw it"
        )


def _malformed(tree: GoldenTree, evidence: wire.Evidence | None) -> str:
    """Why the evidence is malformed; "" where it is not."""
    nodes = len(tree.tokens)
    if evidence is None:
        return "a verify round brought no evidence although the session asked for it"
    sizes = [len(each) for each in (evidence.probs, evidence.raw_probs, evidence.draws, evidence.entropies)]
    if sizes != [nodes, nodes, nodes + 1, nodes + 1]:
        return f"evidence of a tree of {nodes} nodes has values of {sizes[0]}"
    if (evidence.tokens, evidence.parents) != (list(tree.tokens), list(tree.parents)):
        return "evidence is of another tree than was sent"
    return ""


def _drawn(answer: Answered) -> Iterator[Drawn]:
    """The draws at the tree's rows."""
    for row, token, margin in zip(answer.tree.rows, answer.draw.tokens, answer.draw.margins, strict=True):
        where = f"{answer.name}, seed {answer.draw.seed}, row {row}"
        yield Drawn(where, answer.evidence.draws[row], token, margin)


def sampling_name(golden: GoldenDistribution) -> str:
    return f"T {golden.temperature:g}, top-k {golden.top_k}, top-p {golden.top_p:g}"


def _prime_request(
    tree: GoldenTree, golden: GoldenDistribution, seed: int, acceptance: wire.Acceptance, context_limit: int
) -> wire.PrimeRequest:
    wanted = len(tree.rows) + BEYOND_TREE
    return wire.PrimeRequest(
        version=wire.PROTOCOL_VERSION,
        prompt=list(tree.prompt),
        sampling=wire.Sampling(golden.temperature, golden.top_k, golden.top_p),
        acceptance=acceptance,
        seed=seed,
        max_new_tokens=min(wanted, context_limit - len(tree.prompt)) if context_limit else wanted,
        draft_side="device",
        draft_steps=0,
        head_digest="",
        trace=True,
    )


def centred(values: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """values [N] without the mean of their siblings."""
    groups = np.unique(parents, return_inverse=True)[1]
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]
