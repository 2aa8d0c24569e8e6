"""What tells conversations apart: an id made from the text where a source has none, and the text of the opening.

Two conversations with one opening are taken for the same one, whatever their ids and however much of them a source
keeps: a calibration prompt is often just the first turn of a conversation that another set holds whole.
Knows texts; no files.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from hyco_export.core.conversations import USER_ROLE, Conversation, Message

DIGEST_BYTES = 16  # of 2^64 conversations two would share one by chance
CONTENT_PREFIX = "text:"


def content_id(messages: Iterable[Message]) -> str:
    """A stable id of a conversation without one: equal texts, equal ids, in every source and at every place."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for message in messages:
        for part in (message.role, message.content):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)  # lengths: "ab","c" is not "a","bc"
    return CONTENT_PREFIX + digest.hexdigest()


def opening_digest(conversation: Conversation) -> bytes:
    """Of the first user message, else of all text; Unicode form, white space and case do not matter."""
    users = (message.content for message in conversation.messages if message.role == USER_ROLE)
    text = next(users, None)
    if text is None:
        text = "\n".join(message.content for message in conversation.messages)
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Identities:
    """The conversations of one or more sets, known by id and by opening."""

    ids: frozenset[str]
    openings: frozenset[bytes]

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation.id in self.ids or (bool(self.openings) and opening_digest(conversation) in self.openings)


def identities(conversations: Iterable[Conversation]) -> Identities:
    """Of all these conversations."""
    pairs = [(conversation.id, opening_digest(conversation)) for conversation in conversations]
    return Identities(frozenset(name for name, _ in pairs), frozenset(opening for _, opening in pairs))
