"""The cut of a prompt: where it is made, and when there is none."""

import pytest

from hyco_export.core.data.conversations import Message
from hyco_export.errors import RecipeError
from hyco_export.evaluate.quality.prompt_fitting import MARK, fit_prompt
from tests.support.words import WordTokenizer

LONG = " ".join(f"w{number}" for number in range(40))


def test_a_prompt_that_fits_is_left_alone() -> None:
    words = WordTokenizer()
    whole = fit_prompt(words, [Message("user", LONG)], None)  # type: ignore[arg-type]
    assert (whole.whole, whole.cut) == (42, 0)
    assert fit_prompt(words, [Message("user", LONG)], 42) == whole  # type: ignore[arg-type]


def test_the_longest_message_loses_its_middle() -> None:
    words = WordTokenizer()
    messages = [Message("user", "short one"), Message("assistant", LONG), Message("user", "and now?")]
    fitted = fit_prompt(words, messages, 30)  # type: ignore[arg-type]
    assert len(fitted.ids) == 30 and fitted.whole == 48 and fitted.cut == 18
    text = words.decode(fitted.ids)
    assert "short one" in text and "and now?" in text
    assert "w0 w1" in text and "w38 w39" in text and MARK.strip() in text and "w20" not in text


def test_a_prompt_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(RecipeError, match="the longest message has 40 tokens, 37 are too many"):
        fit_prompt(WordTokenizer(), [Message("user", LONG)], 5)  # type: ignore[arg-type]


def test_words_that_grow_in_a_cut_are_cut_again() -> None:
    class Growing(WordTokenizer):
        """Every id of a cut text twice, the first time."""

        grown = False

        def apply_chat_template(self, turns, **options):  # type: ignore[no-untyped-def]
            ids = super().apply_chat_template(turns, **options)
            if MARK.strip() in turns[0]["content"] and not self.grown:
                self.grown = True
                return [*ids, ids[-1]]
            return ids

    assert len(fit_prompt(Growing(), [Message("user", LONG)], 30).ids) <= 30  # type: ignore[arg-type]
