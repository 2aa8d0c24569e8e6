"""Two things a reader can look at: where a median round's time goes, and one tree with readable tokens.

Chosen from traces by fixed rules, never by hand or at random. Pure; draws nothing.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hyco_export.evaluate.metrics import taken, timed_steps
from hyco_export.runtime.trace import GenerationTrace, RoundTrace

LABEL_LENGTH = 12  # characters of a token in a picture
SPACE_MARK, NEWLINE_MARK, EMPTY_MARK = "·", "⏎", "∅"


class RoundTimes(msgspec.Struct, frozen=True):
    """Medians over a system's undisturbed rounds, in the order in which things happen."""

    system: str
    head_ms: float
    slm_ms: float
    scoring_ms: float
    transfer_ms: float  # waiting for the reply beyond the server's own time: both ways, HTTP, queueing
    server_ms: float
    commit_ms: float

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds by phase, in order."""
        return {
            name.removesuffix("_ms"): getattr(self, name) for name in self.__struct_fields__ if name.endswith("_ms")
        }


class DrawnTree(msgspec.Struct, frozen=True):
    """One round's tree; rows as they were sent."""

    system: str
    prompt_id: str
    round: int
    root: str
    labels: tuple[str, ...]
    parents: tuple[int, ...]
    sources: tuple[int, ...]
    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    bonus: str


def median_times(system: str, traces: Sequence[GenerationTrace]) -> RoundTimes | None:
    """Median of every phase over all undisturbed rounds; None where there is none."""
    rounds = timed_steps(traces).rounds
    if not rounds:
        return None
    table = np.array(
        [
            (
                record.head_ms,
                record.slm_ms,
                max(0.0, record.draft_ms - record.head_ms - record.slm_ms),
                max(0.0, record.wait_ms - record.server_ms),  # drafting meanwhile is part of the wait
                record.server_ms,
                record.commit_ms,
            )
            for record in rounds
        ]
    )  # [rounds, 6]
    return RoundTimes(system, *(float(value) for value in np.median(table, axis=0)))


def pick_tree(traces: Sequence[GenerationTrace], text_of: Callable[[int], str]) -> DrawnTree | None:
    """The first of the most telling rounds: most kinds of drafters accepted, then the longest path.

    Rounds that ended an answer are left out: their path may be cut. None when no other round sent a tree.
    """
    candidates = [
        (trace, record) for trace in traces for record in trace.rounds if len(record.tree) and not record.finished
    ]
    if not candidates:
        return None
    trace, record = max(candidates, key=lambda pair: (_kinds(pair[1]), len(pair[1].accepted)))
    return DrawnTree(
        system=trace.system,
        prompt_id=trace.prompt_id,
        round=record.round,
        root=label(text_of(trace.tokens[record.length + len(record.kept) - trace.prompt_length - 1])),
        labels=tuple(label(text_of(token)) for token in record.tree.tokens),
        parents=record.tree.parents,
        sources=tuple(int(source) for source in record.tree.sources),
        accepted=record.accepted,
        drawn=record.drawn,
        bonus=label(text_of(record.tokens[-1])),
    )


def label(text: str) -> str:
    """A token's text in one short line; spaces and line ends become visible."""
    shown = text.replace("\n", NEWLINE_MARK).replace(" ", SPACE_MARK) or EMPTY_MARK
    shown = "".join(letter if letter.isprintable() else "�" for letter in shown)
    return shown if len(shown) <= LABEL_LENGTH else shown[: LABEL_LENGTH - 1] + "…"


def _kinds(record: RoundTrace) -> int:
    return len({record.tree.sources[row] for row in taken(record)})
