"""A chat conversation under an id: roles, turns, the prompt in it, and when two conversations are the same.

A conversation without an id gets one made from its text. Calibration and validation stay apart from counted text by id
and by first user message (`Identities`).
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from hyco_export.errors import RecipeError

ASSISTANT_ROLES = ("assistant", "model")
USER_ROLE = "user"
ROLES = ("system", "developer", USER_ROLE, *ASSISTANT_ROLES, "tool", "function")
DIGEST_BYTES = 16  # of 2^64 conversations two would share one by chance
CONTENT_PREFIX = "text:"
ROLE_HINT = "the roles that are known are {}; what ShareGPT calls human and gpt are user and assistant".format(
    ", ".join(ROLES)
)


class Message(msgspec.Struct, frozen=True):
    """One turn."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """A conversation; `id` and first user message keep calibration and counting apart (`Identities`)."""

    id: str
    messages: tuple[Message, ...]

    @property
    def assistant_texts(self) -> tuple[str, ...]:
        """The assistant's turns, without the white space that chat templates trim."""
        return tuple(m.content.strip() for m in self.messages if m.role in ASSISTANT_ROLES)


def require_known_roles(conversation: Conversation) -> None:
    """Raises RecipeError: a turn whose role is not in ROLES."""
    unknown = sorted({message.role for message in conversation.messages} - set(ROLES))
    if unknown:
        raise RecipeError(f"conversation {conversation.id!r} has turns of {', '.join(map(repr, unknown))}", ROLE_HINT)


def prompt_messages(conversation: Conversation) -> tuple[Message, ...]:
    """The turns up to the last one that is not the assistant's: the prompt for the verifier.

    Raises:
        RecipeError: an unknown role, only assistant turns, no user's turn, or one without text at the end.
    """
    require_known_roles(conversation)
    messages, name = conversation.messages, f"conversation {conversation.id!r}"
    while messages and messages[-1].role in ASSISTANT_ROLES:
        messages = messages[:-1]
    if not messages:
        raise RecipeError(f"{name} has no turn to answer", "remove it from the file")
    if not any(message.role == USER_ROLE for message in messages):
        found = ", ".join(message.role for message in messages)
        raise RecipeError(
            f"{name} has no turn to answer: no user speaks in it, only {found}", "remove it from the file"
        )
    if not messages[-1].content.strip():
        raise RecipeError(f"{name} has no turn to answer: the last one has no text", "remove it from the file")
    return messages


def asked_and_said(conversation: Conversation) -> tuple[tuple[Message, ...], str | None]:
    """The turns before the assistant's last word, and that word; None where a question stands last.

    Raises:
        RecipeError: an unknown role.
    """
    require_known_roles(conversation)
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last.role not in ASSISTANT_ROLES:
        return conversation.messages, None
    return conversation.messages[:-1], last.content.strip()


def first_turn(conversation: Conversation) -> Conversation:
    """The conversation up to its first user message; whole where it has none."""
    roles = [message.role for message in conversation.messages]
    if USER_ROLE not in roles:
        return conversation
    return Conversation(conversation.id, conversation.messages[: roles.index(USER_ROLE) + 1])


def content_id(messages: Iterable[Message]) -> str:
    """A stable id from the text alone: equal texts have equal ids in every source and at every place."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for message in messages:
        for part in (message.role, message.content):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)  # lengths: "ab","c" is not "a","bc"
    return CONTENT_PREFIX + digest.hexdigest()


def first_message_digest(conversation: Conversation) -> bytes:
    """Digest of the first user message, else of all text; Unicode form, white space and case do not matter."""
    users = (message.content for message in conversation.messages if message.role == USER_ROLE)
    text = next(users, None)
    if text is None:
        text = "\n".join(message.content for message in conversation.messages)
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Identities:
    """The conversations of one or more sets, known by id and by first user message."""

    ids: frozenset[str]
    first_messages: frozenset[bytes]

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation.id in self.ids or (
            bool(self.first_messages) and first_message_digest(conversation) in self.first_messages
        )


def identities(conversations: Iterable[Conversation]) -> Identities:
    """Identities of these conversations."""
    pairs = [(conversation.id, first_message_digest(conversation)) for conversation in conversations]
    return Identities(frozenset(name for name, _ in pairs), frozenset(first_message for _, first_message in pairs))
