"""Script membership of token texts."""

import pytest

from hyco_export.core.keepset import in_scripts
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
