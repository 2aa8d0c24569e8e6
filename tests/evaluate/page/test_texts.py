"""Texts of ids and prompts."""

from tokenizers import Tokenizer

from hyco_export.core.data.conversations import Conversation, Message
from hyco_export.core.files import resource_path
from hyco_export.evaluate.page.texts import Texts, prompt_texts

TOKENIZER = Tokenizer.from_file(str(resource_path("hyco_export/dev/tiny/checkpoints/verifier/tokenizer.json")))


def test_pieces_join_to_the_whole_text() -> None:
    said = "def naïve(x):\n    return '한글 → ok'  # done"
    ids = TOKENIZER.encode(said, add_special_tokens=False).ids
    pieces = Texts(TOKENIZER).pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == TOKENIZER.decode(ids)


def test_without_a_tokenizer_ids_stand_for_themselves() -> None:
    texts = Texts()
    assert not texts.known
    assert texts.pieces([5, 17]) == ["5 ", "17 "] and texts.of_ids([17, 5, 17]) == {5: "5", 17: "17"}


def test_single_ids_have_their_text() -> None:
    ids = TOKENIZER.encode("return None", add_special_tokens=False).ids
    found = Texts(TOKENIZER).of_ids(ids)
    assert found == {token: TOKENIZER.decode([token], skip_special_tokens=False) for token in ids}


def test_a_prompts_text_is_its_last_question() -> None:
    turns = (Message("user", "first"), Message("assistant", "reply"), Message("user", "second"))
    texts = Texts(prompts=prompt_texts([Conversation("c1", turns)]))
    assert texts.prompt("c1") == "second" and texts.prompt("c2") == ""


def test_bytes_that_spell_nothing_break_no_page() -> None:
    """`tokenizers`' DecodeStream raises here: the byte before was a letter until the next one came."""
    half = TOKENIZER.encode("한", add_special_tokens=False).ids[0]
    quote, word = (TOKENIZER.encode(text, add_special_tokens=False).ids[-1] for text in ('"', " example"))
    pieces = Texts(TOKENIZER).pieces([quote, half, word])
    assert len(pieces) == 3 and pieces[1] == "" and pieces[2].endswith("\ufffd example")
