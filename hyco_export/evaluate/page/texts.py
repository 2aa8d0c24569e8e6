"""Texts of token ids and prompts, for a reader of rounds; without a tokenizer ids stand for themselves."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hyco_export.core.data.conversations import Conversation, prompt_messages
from hyco_export.core.data.detokeniser import Detokeniser

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
        text = Detokeniser(partial(self._tokenizer.decode, skip_special_tokens=False))
        return [text.push([token]) for token in ids]


def prompt_texts(conversations: Iterable[Conversation]) -> dict[str, str]:
    """The last question of every conversation, by its id."""
    found = {}
    for conversation in conversations:
        asked = [message.content for message in prompt_messages(conversation) if message.role == "user"]
        found[conversation.id] = asked[-1] if asked else ""
    return found
