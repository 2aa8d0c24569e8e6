"""A chat model over the toy engine: every id is a letter."""

from collections.abc import Mapping, Sequence

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.server.chat.completions import ChatModel
from tests.support.scripted import VOCAB_SIZE

NAME = "toy/model"
LETTERS = "abcdefghijklmnop"  # of the ids 0 ... 15
USUAL = wire.Sampling(1.0, 5, 0.95)
assert len(LETTERS) == VOCAB_SIZE


class Letters:
    """ChatText whose template writes the turns one after another and refuses other characters."""

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "".join(message["content"] for message in messages)
        if not text or set(text) - set(LETTERS):
            raise ProtocolError("unsupported", "the chat template refuses these turns")
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in ids)


CHAT = ChatModel(NAME, Letters(), USUAL)
