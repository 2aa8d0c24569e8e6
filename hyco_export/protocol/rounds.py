"""One round's decision: from the verify forward's logits to the tokens that are committed. Pure numpy.

Joins sampling and acceptance, then cuts the path at the first stop id or at the token cap. Knows no sessions.
"""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
import numpy as np

from hyco_export.errors import ProtocolError
from hyco_export.protocol import acceptance, sampling, wire
from hyco_export.protocol.acceptance import EVERYTHING, NO_VALUES, PROBS, RAW, RULES, Judged, decide
from hyco_export.protocol.tree import ROOT, depths

Finished = Literal["", "stop", "length"]


class Outcome(msgspec.Struct, frozen=True):
    """What a round commits: `tokens` are the accepted rows' tokens and, unless the path was cut, the bonus."""

    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    tokens: tuple[int, ...]
    finished: Finished


def first_token(logits: np.ndarray, settings: wire.Sampling, seed: int, position: int) -> int:
    """The draw after a prompt: logits [V] of its last token, which stands at `position`."""
    support = sampling.sampling_support(logits[None], settings)
    return int(sampling.draws(support, seed, np.array([position]))[0])


def judge(
    logits: np.ndarray,
    tokens: Sequence[int],
    parents: Sequence[int],
    root_position: int,
    request: wire.PrimeRequest,
    stop_ids: frozenset[int],
) -> tuple[acceptance.Verdict, wire.Evidence | None]:
    """logits [N + 1, V] of the root and the tree's nodes -> the verdict of the session's rule; by what, on request."""
    reads = EVERYTHING if request.trace else RULES[request.acceptance.rule].reads
    judged = look(logits, tokens, parents, root_position, request.sampling, request.seed, reads)
    verdict = decide(judged, request.acceptance, stop_ids)
    return verdict, judged.evidence() if request.trace else None


def look(
    logits: np.ndarray,
    tokens: Sequence[int],
    parents: Sequence[int],
    root_position: int,
    settings: wire.Sampling,
    seed: int,
    reads: frozenset[str],
) -> Judged:
    """What a rule that `reads` these values decides by, of logits [N + 1, V].

    A row's draw is keyed by the session's seed, the row's absolute position and the row.
    """
    support = sampling.sampling_support(logits, settings)
    positions = root_position + np.concatenate([[0], depths(parents)])  # [N + 1]
    drawn = sampling.draws(support, seed, positions)
    probs = sampling.node_probabilities(support, tokens, parents) if PROBS in reads else NO_VALUES
    raw, entropies = NO_VALUES, NO_VALUES
    if RAW in reads:
        raw, entropies = sampling.raw_distribution(logits, settings.temperature, tokens, parents)
    return Judged(tuple(tokens), tuple(parents), tuple(drawn.tolist()), probs, raw, entropies)


def joined(kept: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The tree behind a line of tokens that are committed already, as one tree: what the verifier forwards."""
    if not kept:
        return tokens, parents
    count = len(kept)
    return [*kept, *tokens], [*range(ROOT, ROOT + count), *(parent + count for parent in parents)]


def joined_path(kept: Sequence[int], accepted: Sequence[int]) -> tuple[int, ...]:
    """Rows of the joined tree that are committed: the whole line, then the accepted rows of the tree."""
    return (*range(len(kept)), *(row + len(kept) for row in accepted))


def check_kept(kept: Sequence[int], allowed: bool, stop_ids: frozenset[int], room: int) -> None:
    """Refuse tokens that the device may not have kept.

    Raises:
        ProtocolError: codes unsupported, value_range.
    """
    if not kept:
        return
    if not allowed:
        raise ProtocolError(
            "unsupported", "kept holds tokens, but the session verifies every token", "prime with `unverified`"
        )
    if not stop_ids.isdisjoint(kept):
        raise ProtocolError("value_range", "kept holds a stop id: the answer had ended there", "delete the session")
    if len(kept) >= room:
        raise ProtocolError("value_range", f"kept holds {len(kept)} tokens, {room} may be committed, one by a round")


def settle(verdict: acceptance.Verdict, tokens: Sequence[int], stop_ids: frozenset[int], room: int) -> Outcome:
    """The verdict cut at the first stop id, then at `room` tokens (>= 1)."""
    committed = [*(int(tokens[row]) for row in verdict.accepted), verdict.bonus]
    finished = finish_reason(committed, stop_ids, room)
    kept = cut_length(committed, stop_ids, room)
    return Outcome(verdict.accepted[:kept], verdict.drawn[:kept], tuple(committed[:kept]), finished)


def cut_length(committed: Sequence[int], stop_ids: Collection[int], room: int) -> int:
    """How many of these tokens are committed: up to the first stop id, at most `room`."""
    stop = next((index for index, token in enumerate(committed) if token in stop_ids), len(committed))
    return min(len(committed), stop + 1, room)


def finish_reason(committed: Sequence[int], stop_ids: frozenset[int], room: int) -> Finished:
    """Why generation ends with these tokens: a stop id among the first `room`, `room` used up, or not at all."""
    if not stop_ids.isdisjoint(committed[:room]):
        return "stop"
    return "length" if len(committed) >= room else ""
