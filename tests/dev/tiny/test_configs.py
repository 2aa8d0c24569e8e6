"""The tokenizer's mechanics: ids, round trips, byte tokens, chat template."""

import pytest

from hyco_export.dev.tiny.configs import (
    BOS_ID,
    BYTE_TOKENS,
    SPECIAL_TOKENS,
    STOP_IDS,
    TURN_END_ID,
    VOCAB_SIZE,
    train_tokenizer,
)

TEXTS = [
    "What does statistics.median do?",
    "日本語のテキスト",
    "emoji 😀👩‍👩‍👧 end",
    "tab\tand\ttabs",
    "two  spaces, three   spaces",
    "line\n\n  indented\n",
    " leading and trailing ",
    "한국어 and ελληνικά",
    "",
]


def test_vocabulary_is_specials_then_bytes_then_pieces(tokenizer):
    assert len(tokenizer) == VOCAB_SIZE
    first = tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS) + len(BYTE_TOKENS))))
    assert first == [*SPECIAL_TOKENS, *BYTE_TOKENS]
    assert STOP_IDS == [1, 6]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids[1:]) == text


def test_unknown_characters_become_byte_tokens(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("日", add_special_tokens=False).input_ids)
    assert pieces == ["<0xE6>", "<0x97>", "<0xA5>"]


def test_byte_tokens_are_not_captured_from_text(tokenizer):
    text = "<0x0A>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 1
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_captured_and_skipped(tokenizer):
    ids = tokenizer("a<turn|>", add_special_tokens=False).input_ids
    assert ids[-1] == TURN_END_ID
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert ids.count(BOS_ID) == 1


def test_training_is_deterministic():
    texts = [f"word{number} and number {number}" for number in range(3000)]
    assert train_tokenizer(texts).backend_tokenizer.to_str() == train_tokenizer(texts).backend_tokenizer.to_str()
