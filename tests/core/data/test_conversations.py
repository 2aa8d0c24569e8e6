"""Turns of a conversation: what is answered, what the assistant said, what a first turn is."""

import pytest

from hyco_export.core.data.conversations import Conversation, Message, first_turn, prompt_messages
from hyco_export.errors import RecipeError


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation("x", tuple(Message(role, text) for role, text in turns))


def test_only_the_trimmed_assistant_turns_are_its_texts():
    assert conversation(("user", "Hi"), ("assistant", " Yes.\n")).assistant_texts == ("Yes.",)


def test_the_prompt_ends_before_the_last_answer():
    turns = conversation(("user", "a"), ("assistant", "b"), ("user", "c"), ("model", "d"), ("assistant", "e"))
    assert [m.content for m in prompt_messages(turns)] == ["a", "b", "c"]
    with pytest.raises(RecipeError, match="'x' has no turn to answer"):
        prompt_messages(conversation(("assistant", "b")))


def test_a_first_turn_keeps_the_system_message_and_drops_every_answer():
    turns = conversation(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert [m.content for m in first_turn(turns).messages] == ["s", "a"]
    silent = conversation(("assistant", "b"))
    assert first_turn(silent) == silent
