"""Draws and probabilities by tensor operations against the numpy code that says what is right."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.protocol import acceptance
from hyco_export.protocol.acceptance import EVERYTHING, PROBS, Judged, Query
from hyco_export.protocol.tree import ROOT
from hyco_export.protocol.wire import Sampling
from hyco_export.server.passes.judgement import PassLogits, look

CAP = 30.0
REAL_VOCABULARY = 262_144
PAPER = Sampling(1.0, 64, 0.95)


def soft_capped(values: torch.Tensor, cap: float | None) -> np.ndarray:
    """As transformers' Gemma 4 caps its logits, in their precision."""
    if cap is None:
        return values.float().numpy()
    capped = torch.tanh(values / cap) * cap
    return torch.where(values == -torch.inf, values, capped).float().numpy()


def expected(query: Query) -> Judged:
    logits = query.logits
    rows = soft_capped(logits.values, logits.cap)[logits.start : logits.stop]
    return acceptance.look(query._replace(logits=rows))


def assert_equal(found: Judged | ValueError, query: Query) -> None:
    wanted = expected(query)
    assert isinstance(found, Judged)
    assert found.draws == wanted.draws
    assert found.tokens == wanted.tokens and found.parents == wanted.parents
    assert found.probs.dtype == wanted.probs.dtype and found.probs.tobytes() == wanted.probs.tobytes()
    np.testing.assert_allclose(found.raw_probs, wanted.raw_probs, rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(found.entropies, wanted.entropies, rtol=2e-6, atol=2e-6)


def random_query(
    generator: np.random.Generator, logits: PassLogits, sampling: Sampling, reads: frozenset[str] = EVERYTHING
) -> Query:
    """A tree whose nodes are among the likeliest tokens, so that their probabilities are not all 0."""
    nodes = logits.stop - logits.start - 1
    parents = [int(generator.integers(ROOT, node)) if node else ROOT for node in range(nodes)]
    best = logits.values[logits.start : logits.stop].float().topk(4, dim=1).indices.numpy()
    tokens = [int(best[parent + 1, generator.integers(4)]) for parent in parents]
    return Query(
        logits, tokens, parents, int(generator.integers(1, 5_000)), sampling, int(generator.integers(99)), reads
    )


def values_of(generator: np.random.Generator, rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(generator.normal(0, 8, (rows, vocabulary)).astype(np.float32)).to(dtype)


SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 4, 64, 5_000]),
    st.sampled_from([0.01, 0.5, 0.95, 1.0]),
)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([11, 1_536, 9_999, 20_011]),
    st.lists(st.tuples(st.integers(1, 9), SAMPLINGS), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, CAP]),
)
def test_sessions_of_a_pass_are_judged_as_the_numpy_code_judges_each(
    seed: int, vocabulary: int, parts: list[tuple[int, Sampling]], dtype: torch.dtype, cap: float | None
) -> None:
    generator = np.random.default_rng(seed)
    values = values_of(generator, sum(rows for rows, _ in parts), vocabulary, dtype)
    values[:, [3, vocabulary - 1]] = -torch.inf  # ids that are never generated
    queries, start = [], 0
    for rows, sampling in parts:
        queries.append(random_query(generator, PassLogits(values, cap, start, start + rows), sampling))
        start += rows
    for found, query in zip(look(queries), queries, strict=True):
        assert_equal(found, query)


@pytest.mark.parametrize("sampling", [PAPER, Sampling(0.0, 0, 1.0), Sampling(0.7, 0, 0.9)])
def test_a_real_vocabulary(sampling: Sampling) -> None:
    generator = np.random.default_rng(1)
    logits = PassLogits(values_of(generator, 6, REAL_VOCABULARY, torch.float32), CAP, 0, 6)
    query = random_query(generator, logits, sampling)
    assert_equal(look([query])[0], query)


@pytest.mark.parametrize("distance", [1, 64, 313, 4_000])
@pytest.mark.parametrize("sampling", [Sampling(1.0, 5, 1.0), Sampling(0.0, 0, 1.0)])
def test_tokens_tied_with_the_last_one_stay_wherever_they_stand(sampling: Sampling, distance: int) -> None:
    """More ties than there is room for, in the groups that are looked at and in others."""
    generator = np.random.default_rng(distance)
    values = values_of(generator, 2, 40_000, torch.float32).clamp(max=20.0)
    values[0, 17::distance] = 25.0
    query = random_query(generator, PassLogits(values, CAP, 0, 2), sampling)
    assert_equal(look([query])[0], query)


def test_logits_that_the_soft_cap_makes_equal() -> None:
    """Unequal before it and equal after it: which groups hold the best is then not known before it."""
    values = torch.full((1, 40_000), 100.0)
    values[0] += torch.linspace(0, 500, 40_000)[torch.randperm(40_000, generator=torch.Generator().manual_seed(3))]
    for sampling in (Sampling(1.0, 3, 1.0), Sampling(0.0, 0, 1.0)):
        query = Query(PassLogits(values, CAP, 0, 1), (), (), 7, sampling, 5, EVERYTHING)
        assert_equal(look([query])[0], query)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_fail_their_session_alone(wrong: float) -> None:
    generator = np.random.default_rng(2)
    values = values_of(generator, 6, 20_000, torch.float32)
    values[4, 15_000] = wrong
    queries = [random_query(generator, PassLogits(values, None, start, start + 3), PAPER) for start in (0, 3)]
    first, second = look(queries)
    assert_equal(first, queries[0])
    assert isinstance(second, ValueError) and str(second) == "rows [1] of the logits are not finite"
    with pytest.raises(ValueError, match=r"rows \[1\] of the logits are not finite"):
        expected(queries[1])


def test_rows_before_a_root_are_left_out_and_nothing_is_copied() -> None:
    generator = np.random.default_rng(4)
    logits = PassLogits(values_of(generator, 7, 3_000, torch.float32), CAP, 1, 7)
    later = logits[2:]
    assert (later.start, later.stop) == (3, 7) and later.values is logits.values
    assert np.array_equal(later.numpy(), soft_capped(logits.values, CAP)[3:7])
    query = random_query(generator, later, PAPER)
    assert_equal(look([query])[0], query)


@pytest.fixture
def moved_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that each way out of a tensor takes to the host."""
    moved: list[int] = []

    def counted(name: str) -> None:
        way_out = getattr(torch.Tensor, name)

        def count(tensor: torch.Tensor, *arguments: Any) -> Any:
            moved.append(tensor.nbytes)
            return way_out(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, name, count)

    for name in ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "__array__"):
        counted(name)
    yield moved


@pytest.mark.parametrize(("reads", "limit"), [(frozenset({PROBS}), 8_192), (EVERYTHING, 65_536)])
def test_a_round_moves_few_bytes_to_the_host(
    reads: frozenset[str], limit: int, moved_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(5)
    logits = PassLogits(values_of(generator, 33, REAL_VOCABULARY, torch.float32), CAP, 0, 33)
    query = random_query(generator, logits, PAPER, reads)
    wanted: Sequence[int] = expected(query).draws
    moved_bytes.clear()
    (found,) = look([query])
    assert isinstance(found, Judged) and found.draws == wanted
    assert len(moved_bytes) == 1 and 0 < moved_bytes[0] < limit
