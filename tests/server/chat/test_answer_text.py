"""Detokenised pieces join to the whole text and never show a broken character; stop strings end it in time."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import hyco_export
from hyco_export.models.verifier import load_tokenizer
from hyco_export.server.chat.answer_text import CONTEXT_IDS, REPLACEMENT, WINDOW_IDS, Detokeniser, StopStrings
from hyco_export.server.chat.template import TemplateText

VERIFIER = Path(hyco_export.__file__).parent / "dev/tiny/checkpoints/verifier"
TEXT = "naïve — 한국어, 日本語 👩‍👩‍👧 tokens; the keep set\n\n\tof e\u0301 " * 8


class Bytes:
    """ChatText whose ids are bytes of UTF-8."""

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Stripping(Bytes):
    """As SentencePiece does: the first text of a call loses its space."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


@pytest.fixture(scope="module")
def template() -> TemplateText:
    return TemplateText(load_tokenizer(VERIFIER))


def pieces(detokeniser: Detokeniser, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    ends = np.minimum(np.cumsum([0, *sizes]), len(ids)).tolist()
    return [*(detokeniser.push(ids[start:end]) for start, end in pairwise(ends)), detokeniser.end()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Bytes, Stripping])
def test_pieces_join_to_the_text_and_hold_whole_characters(kind: type[Bytes], seed: int) -> None:
    ids = list((" " + TEXT).encode())
    sizes = np.random.default_rng(seed).integers(0, 6, len(ids)).tolist()
    found = pieces(Detokeniser(kind()), ids, [*sizes, len(ids)])
    assert "".join(found) == kind().decode(ids)
    assert not any(REPLACEMENT in piece for piece in found)


def test_pieces_of_a_real_tokenizer_join_to_its_text(template: TemplateText) -> None:
    ids = template._tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(ids) > 4 * WINDOW_IDS
    for size in (1, 3, 33, len(ids)):
        found = pieces(Detokeniser(template), ids, [size] * (len(ids) // size + 1))
        assert "".join(found) == TEXT
        assert not any(REPLACEMENT in piece for piece in found)


def test_ids_drawn_at_random_give_one_text_however_they_arrive(template: TemplateText) -> None:
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, 1_500, 200).tolist()  # many bytes that are no character
        one_by_one = "".join(pieces(Detokeniser(template), ids, [1] * len(ids)))
        assert "".join(pieces(Detokeniser(template), ids, [7] * 29)) == one_by_one


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    detokeniser = Detokeniser(Bytes())
    assert [detokeniser.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert detokeniser.push("é".encode()[:1]) == ""
    assert detokeniser.end() == REPLACEMENT
    assert detokeniser.end() == ""


def test_a_long_answer_is_not_decoded_again_and_again() -> None:
    longest = 0

    class Watched(Bytes):
        def decode(self, ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    detokeniser = Detokeniser(Watched())
    text = TEXT * 20
    assert "".join(detokeniser.push([byte]) for byte in text.encode()) == text
    assert CONTEXT_IDS < longest <= 2 * WINDOW_IDS


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["aab"], "aaaab", "aa"),
        (["abc", "b"], "xabc", "xa"),  # the one that is complete first
        (["c", "abc"], "xabc", "x"),  # complete at once: the longest
        (["\n\n", "###"], "a\nb##\n#", "a\nb##\n#"),
        (["ab"], "ab", ""),
        ([], "anything", "anything"),
    ],
)
def test_a_text_ends_before_its_first_stop_string_however_it_arrives(
    stops: list[str], text: str, expected: str
) -> None:
    for size in range(1, len(text) + 1):
        strings = StopStrings(stops)
        parts = [strings.push(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(parts) + strings.end() == expected
        assert strings.found == (expected != text)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["\n\nQ:"])
    assert [strings.push(part) for part in ("a", "\n", "\n", "Q", "x", "\n\n", "Q:", "y")] == [
        "a", "", "", "", "\n\nQx", "", "", "",
    ]  # fmt: skip
    assert strings.found and strings.end() == ""
