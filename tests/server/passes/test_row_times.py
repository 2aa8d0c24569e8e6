"""The curve of a server's passes: which passes are made, what counts, and what a start may take."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Judged, Query
from hyco_export.server.interfaces import Check, Prefill, SequentialModels
from hyco_export.server.passes.row_times import REPEATS, ROWS, SLICE_S, Asked, measure_rows
from tests.support.scripted import VOCAB_SIZE

CONTEXT = 8
GREEDY = wire.Sampling(0.0, 0, 1.0)


class Priced(SequentialModels):
    """A pass of n rows takes 10 + n ms and its judgement 2 ms, a first pass ten times that; also the clock."""

    name = "scripted"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.asked: list[int] = []
        self.open: list[str] = []
        self._scale = scale

    def session(self) -> "Priced":
        self.open.append("opened")
        return self

    def reserve(self, positions: int) -> None:
        assert positions == CONTEXT + 1

    def prime(self, ids: np.ndarray) -> np.ndarray:
        assert len(ids) == CONTEXT
        return np.zeros(VOCAB_SIZE, np.float32)

    def close(self) -> None:
        self.open.append("closed")

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        (part,) = parts
        cold = 1 if part.rows in self.asked else 10
        self.now_ms += self._scale * cold * (10 + part.rows)
        self.asked.append(part.rows)
        return [np.zeros((part.rows, VOCAB_SIZE), np.float32)]

    def look(self, queries: Sequence[Query]) -> list[Judged | ValueError]:
        self.now_ms += self._scale * 2
        return super().look(queries)

    def start(self) -> float:
        return self.now_ms

    def elapsed_ms(self, mark: float) -> float:
        return self.now_ms - mark

    def seconds(self) -> float:
        return self.now_ms / 1000


def measured(models: Priced, node_limit: int = 64) -> list[tuple[int, float]]:
    parts: Any = models  # session, models and clock in one
    asked = Asked(VOCAB_SIZE, node_limit, CONTEXT, GREEDY)
    return measure_rows(parts, parts.session, parts, asked, models.seconds)


@pytest.mark.parametrize(("node_limit", "counts"), [(64, ROWS), (32, ROWS[:-1]), (7, (1, 5))])
def test_the_median_of_warm_passes_counts_judgement_included(node_limit: int, counts: tuple[int, ...]) -> None:
    models = Priced(scale=0.1)
    assert measured(models, node_limit) == [(rows, pytest.approx(0.1 * (12 + rows))) for rows in counts]
    assert models.asked == [rows for rows in counts for _ in range(1 + REPEATS)]
    assert models.open == ["opened", "closed"]


def test_slow_passes_are_made_twice_each() -> None:
    models = Priced(scale=1000 * SLICE_S)
    points = measured(models)
    assert models.asked == [rows for rows in ROWS for _ in range(2)]
    assert [ms for _, ms in points] == pytest.approx([1000 * SLICE_S * (12 + rows) for rows in ROWS])


def test_a_pass_that_fails_leaves_no_session() -> None:
    class Failing(Priced):
        def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
            raise RuntimeError("out of memory")

    models = Failing()
    with pytest.raises(RuntimeError, match="out of memory"):
        measured(models)
    assert models.open == ["opened", "closed"]
