"""Texts of token ids and prompts, for a reader of rounds; without a tokenizer ids stand for themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hyco_export.core.data.conversations import Conversation, prompt_messages

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"  # in the place of bytes that spell no character


class Texts:
    """What a page's ids and prompts say.

    Args:
        tokenizer: the verifier's; None where it is not at hand.
        prompts: text of a prompt by its id.
    """

    def __init__(self, tokenizer: "Tokenizer | None" = None, prompts: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts or {}

    @property
    def known(self) -> bool:
        """Is there a tokenizer."""
        return self._tokenizer is not None

    def prompt(self, prompt_id: str) -> str:
        """A prompt's text; empty where it is not known."""
        return self._prompts.get(prompt_id, "")

    def of_ids(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of every single id; a part of a character that bytes spell is U+FFFD."""
        wanted = sorted(set(ids))
        if self._tokenizer is None:
            return {token: str(token) for token in wanted}
        found = self._tokenizer.decode_batch([[token] for token in wanted], skip_special_tokens=False)
        return dict(zip(wanted, found, strict=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text before it: a character of several tokens stands with its last one."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        stream = TextStream(self._tokenizer)
        return [stream.step(token) for token in ids]


class TextStream:
    """A text from tokens that come one by one.

    What a token adds is seen beside the token before it, since a decoder may treat a text's first token otherwise. A
    text that ends with U+FFFD may end inside a character that bytes spell: it is held back. `tokenizers`' own
    DecodeStream does the same, and raises where later bytes make an earlier one invalid.

    Args:
        tokenizer: the verifier's.
        skip_special: tokens such as the end of a turn add nothing.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._known: list[int] = []  # tokens whose text was given, as far as later ones need them
        self._held: list[int] = []

    def step(self, token: int) -> str:
        """What this token adds; nothing where a character is not complete, or for a special token that is skipped."""
        self._held.append(token)
        added = self._added()
        if not added or added.endswith(BROKEN):
            return ""
        self._known, self._held = self._held, []
        return added

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        added, self._held = self._added(), []
        return added

    def _added(self) -> str:
        known, whole = self._decoded(self._known), self._decoded([*self._known, *self._held])
        if whole.startswith(known):
            return whole[len(known) :]
        return self._decoded(self._held)  # bytes that make the ones before invalid, whose text was given

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))


def prompt_texts(conversations: Iterable[Conversation]) -> dict[str, str]:
    """The last question of every conversation, by its id."""
    found = {}
    for conversation in conversations:
        asked = [message.content for message in prompt_messages(conversation) if message.role == "user"]
        found[conversation.id] = asked[-1] if asked else ""
    return found
