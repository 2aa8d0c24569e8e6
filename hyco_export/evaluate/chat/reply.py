"""A reply while it grows: the text that each step commits, by who proposed it, and the reply's figures so far."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.data.detokeniser import Detokeniser
from hyco_export.core.numerics import MS_PER_S
from hyco_export.evaluate.metrics import BONUS, SOURCE_NAMES, sources_of
from hyco_export.protocol.trace import GenerationTrace, LocalTrace, PrimeTrace, RoundTrace

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Step = PrimeTrace | LocalTrace | RoundTrace
UNVERIFIED = "unverified"
SOURCES = (*SOURCE_NAMES.values(), BONUS, UNVERIFIED)  # who a token may come from, in the order of a legend


class Piece(msgspec.Struct, frozen=True):
    """Text that one source proposed; a character of several tokens is its last token's."""

    text: str
    source: str  # of SOURCES


class Figures(msgspec.Struct, frozen=True):
    """What a reply has cost so far.

    `by_source` counts every token, the one that PRIME drew as the verifier's own (`bonus`). MAT is that of
    `metrics.measure`; speed counts all time since the question, the display's too.
    """

    rounds: int = 0
    verified: int = 0  # tokens that rounds committed
    by_source: dict[str, int] = {}
    first_token_ms: float = 0.0
    total_ms: float = 0.0  # to the last token
    finished: str = ""  # "stop", "length", or "" for a reply that goes on or was ended

    @property
    def tokens(self) -> int:
        """All tokens of the reply."""
        return sum(self.by_source.values())

    @property
    def mat(self) -> float | None:
        """Tokens a round; None before the first one."""
        return self.verified / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first token."""
        return MS_PER_S * self.tokens / self.total_ms if self.total_ms else None


class Reply:
    """Follows one generation by its trace.

    Args:
        tokenizer: the verifier's.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._text = Detokeniser(partial(tokenizer.decode, skip_special_tokens=True))
        self._seen = (0, 0, 0)  # calls of PRIME, local steps, rounds
        self.figures = Figures(by_source=dict.fromkeys(SOURCES, 0))

    def follow(self, trace: GenerationTrace) -> list[Piece]:
        """The text that came since the last call; figures grow with it."""
        primes, local, rounds = self._seen
        self._seen = (len(trace.primes), len(trace.locals), len(trace.rounds))
        newer: list[Step] = [*trace.primes[primes:], *trace.locals[local:], *trace.rounds[rounds:]]
        newer.sort(key=lambda step: step.start_ms)
        verified = sum(len(record.tokens) for record in trace.rounds[rounds:])
        drawn = [pair for step in newer for pair in _drawn(step)]
        counts = self.figures.by_source
        self.figures = Figures(
            len(trace.rounds),
            self.figures.verified + verified,
            {source: counts[source] + sum(source == one for _, one in drawn) for source in SOURCES},
            trace.first_token_ms,
            trace.total_ms,
            trace.finished,
        )
        return _joined([Piece(self._text.push([token]), source) for token, source in drawn])

    def end(self) -> list[Piece]:
        """The text that was held back for a character that did not become complete."""
        return _joined([Piece(self._text.end(), BONUS)])


def _drawn(step: Step) -> Iterator[tuple[int, str]]:
    """Tokens that a step committed, each with its source."""
    if isinstance(step, PrimeTrace):
        yield step.root, BONUS
    elif isinstance(step, LocalTrace):
        yield from ((token, UNVERIFIED) for token in step.tokens)
    else:
        yield from zip(step.tokens, sources_of(step), strict=True)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Without empty ones, neighbours of one source as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].source == piece.source:
            found[-1] = Piece(found[-1].text + piece.text, piece.source)
        elif piece.text:
            found.append(piece)
    return found
