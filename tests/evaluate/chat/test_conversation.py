"""A conversation over the scripted server: what a turn's prompt holds, and what stays when a reply ends early."""

from collections.abc import Sequence

import pytest

from hyco_export.errors import HycoError, ProtocolError, UnreachableError
from hyco_export.evaluate.chat.conversation import Conversation
from hyco_export.evaluate.chat.reply import Figures, Piece
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.models.verifier import load_tokenizer
from tests.support.scripted_chat import HOW, VERIFIER, scripted_conversation

TOKENIZER = load_tokenizer(VERIFIER)


class Shown:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, pieces: Sequence[Piece], figures: Figures) -> None:
        self.pieces += pieces

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def never() -> bool:
    return False


def ask(conversation: Conversation, question: str) -> tuple[Shown, Figures]:
    shown = Shown()
    return shown, conversation.ask(question, shown, never)


def spoken(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def test_a_reply_is_the_models_own_text_and_every_source_speaks() -> None:
    conversation, starter = scripted_conversation()
    shown, figures = ask(conversation, "What is it?")
    expected = starter.server.model.answer(starter.started[0].ids, HOW.max_new_tokens)
    assert shown.text == TOKENIZER.decode(expected, skip_special_tokens=True)
    assert {"chain", "runner-up", "slm", "bonus"} == {piece.source for piece in shown.pieces}
    assert figures.tokens == len(expected) == HOW.max_new_tokens and figures.finished == "length"
    assert len(starter.server.closed) == 1


def test_a_turn_is_asked_with_all_that_was_said_before_it() -> None:
    conversation, starter = scripted_conversation()
    first, _ = ask(conversation, "What is it?")
    ask(conversation, "And then?")
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    assert list(starter.started[1].ids) == encode_prompt(TOKENIZER, messages)
    assert len(conversation.messages) == 4 and [prompt.id for prompt in starter.started] == ["question-1", "question-2"]


def test_a_reply_that_the_user_ends_keeps_what_was_said() -> None:
    conversation, starter = scripted_conversation()
    shown, steps = Shown(), []

    def after_two() -> bool:
        steps.append(1)
        return len(steps) > 2

    figures = conversation.ask("What is it?", shown, after_two)
    assert (figures.rounds, figures.finished) == (1, "") and 0 < figures.tokens < HOW.max_new_tokens
    assert spoken(conversation) == [("user", "What is it?"), ("assistant", shown.text)] and shown.text
    assert len(starter.server.closed) == 1 and conversation.traces[0].finished == ""


@pytest.mark.parametrize("failure", [UnreachableError("away"), ProtocolError("cache_full", "no room")])
def test_a_failure_leaves_the_conversation_and_the_question_can_be_asked_again(failure: HycoError) -> None:
    conversation, starter = scripted_conversation()
    ask(conversation, "What is it?")
    before = spoken(conversation)
    starter.server.at = {starter.server.rounds + 2: failure}
    with pytest.raises(type(failure)):
        ask(conversation, "And then?")
    assert spoken(conversation)[:2] == before and spoken(conversation)[2] == ("user", "And then?")
    assert starter.checks == 0
    shown = Shown()
    conversation.ask_again(shown, never)
    assert spoken(conversation) == [*before, ("user", "And then?"), ("assistant", shown.text)]
    assert starter.checks == 1  # whether the same server is back
    ask(conversation, "Go on.")
    assert starter.checks == 1
    assert len(conversation.traces) == 4


def test_an_answer_stays_when_asking_again_comes_to_nothing() -> None:
    conversation, starter = scripted_conversation()
    ask(conversation, "What is it?")
    before = spoken(conversation)
    starter.server.prime = lambda request: (_ for _ in ()).throw(UnreachableError("away"))  # type: ignore[method-assign]
    with pytest.raises(UnreachableError):
        conversation.ask_again(Shown(), never)
    assert spoken(conversation) == before


def test_another_server_is_not_talked_to() -> None:
    conversation, starter = scripted_conversation({1: UnreachableError("away")})
    with pytest.raises(UnreachableError):
        ask(conversation, "What is it?")
    starter.same_server = False
    for _ in range(2):
        with pytest.raises(HycoError, match="another server"):
            ask(conversation, "What is it?")
    assert len(starter.started) == 1


def test_nothing_can_be_asked_again_before_the_first_question_or_after_a_reset() -> None:
    conversation, _ = scripted_conversation()
    for _ in range(2):
        with pytest.raises(HycoError, match="nothing was asked yet"):
            conversation.ask_again(Shown(), never)
        ask(conversation, "What is it?")
        conversation.reset()
    assert not conversation.messages and not conversation.traces and not conversation.rounds
