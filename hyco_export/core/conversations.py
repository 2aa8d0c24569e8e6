"""Chat conversations as JSONL: one `{"id": ..., "messages": [{"role", "content"}, ...]}` a line, read as a stream.

Knows the file's form and names the line that breaks it; not what the text is used for.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hyco_export.errors import RecipeError

ASSISTANT_ROLES = ("assistant", "model")


class Message(msgspec.Struct, frozen=True):
    """One turn."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """A conversation; `id` is what keeps calibration and counting apart."""

    id: str
    messages: tuple[Message, ...]

    @property
    def assistant_texts(self) -> tuple[str, ...]:
        """What the assistant said, turn by turn, without the white space that chat templates trim."""
        return tuple(m.content.strip() for m in self.messages if m.role in ASSISTANT_ROLES)


_decoder = msgspec.json.Decoder(Conversation)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a JSONL file in file order, one line in memory at a time; empty lines are skipped.

    Raises:
        RecipeError: a line that is not such a conversation; names file, line and field.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError as error:
                raise RecipeError(
                    f"{path.name}, line {number}: {error}",
                    'every line must be {"id": text, "messages": [{"role": text, "content": text}, ...]}',
                ) from error


def conversation_ids(path: Path) -> set[str]:
    """The ids in a JSONL file of conversations.

    Raises:
        RecipeError: as `read_conversations`.
    """
    return {conversation.id for conversation in read_conversations(path)}


def prompt_messages(conversation: Conversation) -> tuple[Message, ...]:
    """The turns up to the last one that is not the assistant's: what the verifier is to answer.

    Raises:
        RecipeError: only assistant turns.
    """
    messages = conversation.messages
    while messages and messages[-1].role in ASSISTANT_ROLES:
        messages = messages[:-1]
    if not messages:
        raise RecipeError(f"conversation {conversation.id!r} has no turn to answer", "remove it from the file")
    return messages
