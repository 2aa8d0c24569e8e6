"""Several programs answer the same prompts greedily, in turn: who says what, and how fast.

Knows contestants by name; no models, no processes. Tokens per second are pooled: all tokens of all answers over all
their time, prefill included. MAT counts what the rounds after the first token committed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

WARM_UP_PROMPTS = 2  # answered by everybody before anything is counted: caches, allocators, compilers


class Answer(msgspec.Struct, frozen=True):
    """One prompt's new tokens; `rounds` are passes of the verifier after the prompt's own."""

    tokens: tuple[int, ...]
    seconds: float
    rounds: int


class Contestant(Protocol):
    """A program that answers prompts."""

    @property
    def name(self) -> str: ...

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer: ...


class Standing(msgspec.Struct, frozen=True):
    """What one contestant did over all prompts."""

    name: str
    tokens: int
    seconds: float
    rounds: int
    answers: int
    differing: tuple[str, ...]  # prompts whose text is not the first contestant's

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mat(self) -> float:
        """Mean tokens committed by a round."""
        return (self.tokens - self.answers) / self.rounds if self.rounds else 0.0


class Comparison(msgspec.Struct, frozen=True):
    """Standings in the order of the contestants; the first one is ours."""

    standings: tuple[Standing, ...]

    @property
    def same_text(self) -> bool:
        """Did everybody say the same, token for token."""
        return not any(standing.differing for standing in self.standings)

    def ratio(self, name: str) -> float:
        """Our tokens per second over those of `name`."""
        return self.standings[0].tokens_per_s / self.find(name).tokens_per_s

    def find(self, name: str) -> Standing:
        return next(standing for standing in self.standings if standing.name == name)


def compare(
    contestants: Sequence[Contestant],
    prompts: Sequence[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    on_step: Callable[[str, int, int], None] = lambda _label, _done, _total: None,
) -> Comparison:
    """All answer a prompt before the next one comes, so that a machine that slows down slows all of them; the one that
    goes first changes from prompt to prompt.

    prompts: (id, ids) pairs.
    """
    for _, ids in prompts[:WARM_UP_PROMPTS]:
        for contestant in contestants:
            contestant.answer(ids, max_new_tokens)
    answers: dict[str, list[Answer]] = {contestant.name: [] for contestant in contestants}
    for done, (_, ids) in enumerate(prompts):
        first = done % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            answers[contestant.name].append(contestant.answer(ids, max_new_tokens))
        on_step("prompts answered by everybody", done + 1, len(prompts))
    ours = answers[contestants[0].name]
    return Comparison(
        tuple(
            Standing(
                name=name,
                tokens=sum(len(answer.tokens) for answer in theirs),
                seconds=sum(answer.seconds for answer in theirs),
                rounds=sum(answer.rounds for answer in theirs),
                answers=len(theirs),
                differing=tuple(
                    prompt_id
                    for (prompt_id, _), mine, other in zip(prompts, ours, theirs, strict=True)
                    if mine.tokens != other.tokens
                ),
            )
            for name, theirs in answers.items()
        )
    )
