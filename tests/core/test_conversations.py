"""Reading chat conversations from JSONL."""

import pytest

from hyco_export.core.conversations import (
    Conversation,
    Message,
    conversation_ids,
    prompt_messages,
    read_conversations,
)
from hyco_export.errors import RecipeError

GOOD = '{"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes.\\n"}]}'


def test_lines_come_in_order_and_empty_ones_are_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n\n" + GOOD.replace('"a"', '"b"') + "\n")
    assert [c.id for c in read_conversations(path)] == ["a", "b"]
    assert conversation_ids(path) == {"a", "b"}


def test_only_the_trimmed_assistant_turns_are_its_texts(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD)
    assert next(read_conversations(path)).assistant_texts == ("Yes.",)


def test_fields_beside_id_and_messages_are_allowed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD.replace('"id"', '"source": 3, "id"'))
    assert len(list(read_conversations(path))) == 1


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"id": 3, "messages": []}', "$.id"),
        ('{"id": "x"}', "messages"),
        ('{"id": "x", "messages": [{"role": "user"}]}', "content"),
        ('{"id": "x", "messages"', "truncated"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, part):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n" + line + "\n")
    with pytest.raises(RecipeError) as caught:
        list(read_conversations(path))
    assert caught.value.message.startswith("data.jsonl, line 2: ")
    assert part in caught.value.message


def test_the_prompt_ends_before_the_last_answer():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("model", "d"), ("assistant", "e")]
    messages = tuple(Message(role, text) for role, text in turns)
    assert [m.content for m in prompt_messages(Conversation("x", messages))] == ["a", "b", "c"]
    with pytest.raises(RecipeError, match="'y' has no turn to answer"):
        prompt_messages(Conversation("y", messages[1:2]))
