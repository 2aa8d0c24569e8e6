"""Script membership of token texts; ranking, shares and smallest size on counts small enough to check by hand."""

import numpy as np
import pytest

from hyco_export.core.keepset import curve, in_scripts, kept_share, rank, smallest_size
from hyco_export.errors import RecipeError


def test_a_text_belongs_to_a_script_when_one_letter_does():
    texts = ["한국", " 안a", "abc", "漢字", "ᄀ", "12", "", "\ufffd"]
    assert in_scripts(texts, ["Hangul"]).tolist() == [True, True, False, False, True, False, False, False]


def test_several_scripts_are_joined():
    assert in_scripts(["한", "漢", "a", "я"], ("Hangul", "Han")).tolist() == [True, True, False, False]


def test_marks_and_signs_without_a_letter_do_not_count():
    # U+302E is a Hangul tone mark, U+3200 a parenthesised Hangul sign: script Hangul, category not a letter
    assert in_scripts(["\u302e", "\u3200"], ["Hangul"]).tolist() == [False, False]


def test_no_scripts_select_nothing():
    assert in_scripts(["한", "a"], []).tolist() == [False, False]


@pytest.mark.parametrize("name", ["Hangol", "Han}|\\p{Latin", ""])
def test_an_unknown_script_is_named(name):
    with pytest.raises(RecipeError) as caught:
        in_scripts(["a"], [name])
    assert repr(name) in caught.value.message
    assert "$.keepset.scripts" in caught.value.message
    assert "Hangul" in caught.value.hint


COUNTS = np.array([0, 5, 9, 5, 0, 0, 1])
FIXED = np.array([True, False, False, False, False, False, False])
PLACEHOLDERS = np.array([False, False, False, False, True, False, False])
HELD_OUT = np.array([1, 0, 6, 2, 0, 1, 0])


def test_fixed_then_frequent_then_small_ids_then_placeholders():
    ranking = rank(COUNTS, FIXED, PLACEHOLDERS)
    assert ranking.order.tolist() == [0, 2, 1, 3, 6, 5, 4]
    assert (ranking.fixed, ranking.known) == (1, 5)


def test_a_placeholder_that_was_seen_is_a_token_like_another():
    seen = COUNTS.copy()
    seen[4] = 7
    assert rank(seen, FIXED, PLACEHOLDERS).order.tolist() == [0, 2, 4, 1, 3, 6, 5]


def test_shares_and_the_smallest_size_for_each():
    ranking = rank(COUNTS, FIXED, PLACEHOLDERS)
    shares = kept_share(ranking, HELD_OUT)
    assert shares.tolist() == [0, 0.1, 0.7, 0.7, 0.9, 0.9, 1.0, 1.0]
    assert [smallest_size(ranking, shares, wanted) for wanted in (0.05, 0.1, 0.7, 0.8, 0.9)] == [1, 1, 2, 4, 4]
    assert smallest_size(ranking, shares, 0.91) is None  # only id 5 would do, and the counts say nothing of it


def test_without_counts_every_share_is_zero():
    ranking = rank(COUNTS, FIXED, PLACEHOLDERS)
    assert kept_share(ranking, np.zeros(7, dtype=np.int64)).tolist() == [0.0] * 8


def test_the_curve_rises_from_the_fixed_part_to_everything_and_holds_the_chosen_size():
    rng = np.random.default_rng(0)
    counts, held_out = rng.zipf(1.3, (2, 5000)).clip(max=10**6)
    ranking = rank(counts, np.arange(5000) < 100, np.zeros(5000, dtype=bool))
    rows = curve(ranking, held_out, counts, 1234)
    sizes = [row["size"] for row in rows]
    assert sizes[0] == 100 and sizes[-1] == 5000 and 1234 in sizes
    assert sizes == sorted(set(sizes)) and 50 < len(sizes) < 120
    for name in ("held_out_share", "counted_share"):
        values = [row[name] for row in rows]
        assert values == sorted(values) and values[-1] == 1.0
