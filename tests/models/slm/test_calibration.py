"""Calibration sees full passes of every sequence, each on empty rings; samples are passes on rings that hold text."""

import numpy as np
import pytest

from hyco_export.core.ring import NO_PARENT
from hyco_export.models.slm.calibration import (
    calibrated_ranges,
    first_passes,
    full_passes,
    prefill_samples,
    random_forest,
    tree_samples,
)
from tests.support.packed_slm import RINGS, ROWS, random_ids
from tests.support.slm_parts import MASK_VALUE, slm_parts


def ranges_over(sequences: list[list[int]], percentile: float = 100.0) -> dict[str, tuple[float, float]]:
    parts = slm_parts()
    return calibrated_ranges(
        parts.float_slm, parts.tables, sequences, ROWS, MASK_VALUE, percentile, 99.9, tell=lambda done, total: None
    )


def test_a_rest_is_left_out() -> None:
    assert full_passes(list(range(13)), 6) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert full_passes([1, 2], 6) == []


def test_ranges_hold_what_occurs() -> None:
    ids = random_ids(12)
    found = ranges_over([ids])
    embeds = slm_parts().tables.tokens(np.asarray(ids))
    assert found["embeds"] == (embeds.min(), embeds.max())
    low, high = found["k_new.0"]
    assert low == -high < 0.0
    assert {"logits.raw", "layers.4.mlp.down", "per_layer.sum"} <= set(found)
    assert not {"layers.0.attention.shares", "layers.0.attention.masked"} & set(found)  # known by construction


def test_sequences_do_not_see_each_other() -> None:
    first, second = random_ids(12, 1), random_ids(12, 2)
    both, alone = ranges_over([first, second]), [ranges_over([ids]) for ids in (first, second)]
    for name in ("layers.4.fed", "logits"):
        assert both[name] == (min(r[name][0] for r in alone), max(r[name][1] for r in alone))


def test_a_lower_percentile_is_narrower() -> None:
    sequences = [random_ids(30, seed) for seed in range(3)]
    wide, narrow = ranges_over(sequences), ranges_over(sequences, 99.0)
    assert narrow["layers.0.mlp.gated"][1] < wide["layers.0.mlp.gated"][1]


def test_progress_counts_passes() -> None:
    parts, told = slm_parts(), []
    calibrated_ranges(
        parts.float_slm,
        parts.tables,
        [random_ids(13), random_ids(6)],
        ROWS,
        MASK_VALUE,
        100.0,
        99.9,
        lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_too_short_sequences_are_an_error() -> None:
    with pytest.raises(ValueError, match="no calibration sequence has 6 tokens"):
        ranges_over([[1, 2, 3]])


def test_parents_come_before_their_children() -> None:
    parents = random_forest(40, np.random.default_rng(0))
    assert all(NO_PARENT <= parent < row for row, parent in enumerate(parents))
    assert len(set(parents)) < 40


def test_samples_stand_on_text() -> None:
    parts, sequences = slm_parts(), [random_ids(20, 1), random_ids(20, 2)]
    trees = tree_samples(parts.float_slm, parts.tables, sequences, ROWS, MASK_VALUE, seed=1)
    prefills = prefill_samples(parts.float_slm, parts.tables, sequences, 8, MASK_VALUE)
    for samples, rows in ((trees, ROWS), (prefills, 8)):
        assert len(samples) == 2
        for feeds in samples:
            assert feeds["embeds"].shape == (rows, 32)
            held = np.abs(feeds["k.1"]).sum(axis=(0, 2)) > 0
            assert held.sum() == rows <= RINGS["full"]
    assert not np.array_equal(trees[0]["embeds"], trees[1]["embeds"])


def test_a_limit_takes_the_first_passes_of_every_sequence() -> None:
    passes = [["a0", "a1", "a2"], ["b0"], ["c0", "c1"]]
    assert first_passes(passes, None) == passes
    assert first_passes(passes, 4) == [["a0", "a1"], ["b0"], ["c0"]]
    assert first_passes(passes, 2) == [["a0"], ["b0"], []]
    assert first_passes(passes, 99) == passes
