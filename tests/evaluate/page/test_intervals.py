"""Intervals against scipy's bootstrap, and what they are made of."""

import msgspec
import numpy as np
import pytest
from scipy import stats

from hyco_export.evaluate.metrics import measure
from hyco_export.evaluate.page.intervals import PARTS, change_interval, prompt_sums, ratio_intervals
from tests.evaluate.page.folders import KEEPSET, answers


def sums_of(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"q{number:03}": rng.uniform(5, 50, len(PARTS)) for number in range(count)}


def test_the_sums_over_prompts_give_the_systems_figures() -> None:
    traces = answers("hyco", 5, 6)
    total = dict(zip(PARTS, sum(prompt_sums(traces).values()), strict=True))
    figures = measure("hyco", traces, KEEPSET)
    assert total["verified"] / total["rounds"] == pytest.approx(figures.mat)
    assert total["server_ms"] / total["tokens"] == pytest.approx(figures.server_ms_per_token)
    assert total["draft_ms"] / total["tokens"] == pytest.approx(figures.draft_ms_per_token)
    assert 1000 * total["tokens"] / total["ms"] == pytest.approx(figures.delivery_tokens_per_s)


def test_turns_and_repeats_of_a_question_are_drawn_together() -> None:
    one, other = answers("hyco", 2, 3)
    second = msgspec.structs.replace(other, prompt_id=f"{one.prompt_id}/turn2")
    assert list(prompt_sums([one, second, one])) == [one.prompt_id]


def test_an_interval_is_scipys() -> None:
    sums = sums_of(60, 1)
    found = ratio_intervals(sums)["server_ms_per_token"]
    table = np.stack(list(sums.values()))
    above, below = table[:, PARTS.index("server_ms")], table[:, PARTS.index("tokens")]
    scipys = stats.bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        method="percentile", n_resamples=20_000, rng=np.random.default_rng(5),
    ).confidence_interval  # fmt: skip
    width = scipys.high - scipys.low
    assert abs(found.low - scipys.low) < 0.05 * width and abs(found.high - scipys.high) < 0.05 * width


def test_a_change_is_paired_over_the_prompts_that_both_answered() -> None:
    baseline = sums_of(40, 2)
    faster = {question: values.copy() for question, values in baseline.items()}
    for values in faster.values():
        values[PARTS.index("server_ms")] *= 0.7
    faster["only here"] = np.full(len(PARTS), 1e6)
    found = change_interval(faster, baseline)
    assert found is not None
    assert found.low == pytest.approx(-0.3) and found.high == pytest.approx(-0.3)  # the same in every draw


def test_one_prompt_has_no_interval_and_neither_has_what_was_not_measured() -> None:
    assert ratio_intervals(sums_of(1, 3)) == {} and change_interval(sums_of(1, 3), sums_of(1, 4)) is None
    unasked = sums_of(5, 4)
    for values in unasked.values():
        values[PARTS.index("rounds")] = 0.0
    assert "mat" not in ratio_intervals(unasked) and "delivery_tokens_per_s" in ratio_intervals(unasked)
