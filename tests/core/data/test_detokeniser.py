"""Detokenised pieces join to the whole text and never show a broken character."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import hyco_export
from hyco_export.core.data.detokeniser import HELD_IDS, REPLACEMENT, Detokeniser
from hyco_export.models.verifier import load_tokenizer
from hyco_export.server.chat.template import TemplateText

VERIFIER = Path(hyco_export.__file__).parent / "dev/tiny/checkpoints/verifier"
TOKENIZER = Tokenizer.from_file(str(VERIFIER / "tokenizer.json"))
TEXT = "naïve — 한국어, 日本語 👩‍👩‍👧 tokens; the keep set\n\n\tof e\u0301 " * 8


class Bytes:
    """Ids that are bytes of UTF-8."""

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
    found = pieces(Detokeniser(kind().decode), ids, [*sizes, len(ids)])
    assert "".join(found) == kind().decode(ids)
    assert not any(REPLACEMENT in piece for piece in found)


def test_pieces_of_a_real_tokenizer_join_to_its_text(template: TemplateText) -> None:
    ids = template._tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(ids) > 4 * HELD_IDS
    for size in (1, 3, 33, len(ids)):
        found = pieces(Detokeniser(template.decode), ids, [size] * (len(ids) // size + 1))
        assert "".join(found) == TEXT
        assert not any(REPLACEMENT in piece for piece in found)


def test_ids_drawn_at_random_give_one_text_however_they_arrive(template: TemplateText) -> None:
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, 1_500, 200).tolist()  # many bytes that are no character
        one_by_one = "".join(pieces(Detokeniser(template.decode), ids, [1] * len(ids)))
        assert "".join(pieces(Detokeniser(template.decode), ids, [7] * 29)) == one_by_one


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    detokeniser = Detokeniser(Bytes().decode)
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

    detokeniser = Detokeniser(Watched().decode)
    text = TEXT * 20
    assert "".join(detokeniser.push([byte]) for byte in text.encode()) == text
    assert 1 < longest <= 8  # two characters of UTF-8


def test_a_special_token_may_add_nothing() -> None:
    end = TOKENIZER.token_to_id("<eos>")
    assert end is not None
    ids = [end, *TOKENIZER.encode("return  None", add_special_tokens=False).ids, end]
    for skipped in (True, False):
        decode = partial(TOKENIZER.decode, skip_special_tokens=skipped)
        assert "".join(pieces(Detokeniser(decode), ids, [1] * len(ids))) == decode(ids)


def test_a_character_of_several_tokens_stands_with_its_last_one() -> None:
    first, *others = TOKENIZER.encode("한", add_special_tokens=False).ids
    detokeniser = Detokeniser(TOKENIZER.decode)
    assert [detokeniser.push([token]) for token in (first, *others)] == [*[""] * len(others), "한"]
    assert detokeniser.push([first]) == "" and detokeniser.end() == REPLACEMENT and detokeniser.end() == ""


@pytest.mark.parametrize("byte", [0x80, 0xC3])
def test_bytes_that_never_spell_a_character_are_not_held_back_for_ever(byte: int) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode("utf-8", "replace")

    detokeniser = Detokeniser(decode)
    parts = [detokeniser.push([token]) for token in (*[byte] * 1_000, *b"then a text")]
    assert "".join(parts) == REPLACEMENT * 1_000 + "then a text"
    assert [bool(part) for part in parts[:HELD_IDS]] == [*[False] * (HELD_IDS - 1), True]
    assert longest == 2 * HELD_IDS


def test_special_tokens_without_end_do_not_grow_the_window() -> None:
    lengths: list[int] = []
    detokeniser = Detokeniser(lambda ids: lengths.append(len(ids)) or "")  # type: ignore[func-returns-value]
    assert detokeniser.push(range(1_000)) == "" and detokeniser.end() == ""
    assert max(lengths) == 2 * HELD_IDS
