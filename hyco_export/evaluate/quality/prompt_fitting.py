"""A turn's prompt as ids: the messages through the chat template, cut where that was asked for.

The rule of the cut (`--truncate N`): while the prompt has more than N ids, its longest message loses as many tokens in
its middle as are too many, and a mark takes their place. What stands first and last in a message stays, since
instructions and questions stand there (LongBench, Bai et al. 2024, cuts in the middle for the same reason).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.data.conversations import Message
from hyco_export.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = " [...] "
LEAST_TOKENS = 8  # of a message that is cut: below that nothing of it is left to be understood
TRIES = 8  # a cut text may have a few tokens more than were kept, where words were split


class FittedPrompt(msgspec.Struct, frozen=True):
    """Ids of a prompt, and how many ids the whole one had; equal where nothing was cut."""

    ids: tuple[int, ...]
    whole: int

    @property
    def cut(self) -> int:
        return self.whole - len(self.ids)


def fit_prompt(tokenizer: "PreTrainedTokenizerFast", messages: Sequence[Message], limit: int | None) -> FittedPrompt:
    """The prompt's ids, at most `limit` of them where there is a limit.

    Raises:
        RecipeError: the chat template refuses the messages, or they are too many to be cut so far.
    """
    turns = list(messages)
    ids = whole = _encode(tokenizer, turns)
    for _ in range(TRIES):
        if limit is None or len(ids) <= limit:
            return FittedPrompt(tuple(ids), len(whole))
        turns = _cut_longest(tokenizer, turns, len(ids) - limit)
        ids = _encode(tokenizer, turns)
    raise RecipeError(
        f"the prompt has {len(ids)} ids after {TRIES} cuts, --truncate is {limit}", "give a larger number"
    )


def _encode(tokenizer: "PreTrainedTokenizerFast", messages: Sequence[Message]) -> list[int]:
    from hyco_export.models.text.tokenizer import encode_prompt

    return encode_prompt(tokenizer, [{"role": one.role, "content": one.content} for one in messages])


def _cut_longest(tokenizer: "PreTrainedTokenizerFast", messages: Sequence[Message], excess: int) -> list[Message]:
    """The messages, the longest of them without `excess` tokens of its middle, the mark counted.

    Raises:
        RecipeError: next to nothing of it would be left.
    """
    spans = [_token_spans(tokenizer, message.content) for message in messages]
    longest = max(range(len(messages)), key=lambda place: len(spans[place]))
    span, text = spans[longest], messages[longest].content
    kept = len(span) - excess - len(_token_spans(tokenizer, MARK))
    if kept < LEAST_TOKENS:
        raise RecipeError(
            f"the longest message has {len(span)} tokens, {excess} are too many", "give a larger --truncate"
        )
    head, tail = span[(kept + 1) // 2 - 1][1], span[-(kept // 2)][0]
    cut = text[:head].rstrip() + MARK + text[tail:].lstrip()
    return [*messages[:longest], Message(messages[longest].role, cut), *messages[longest + 1 :]]


def _token_spans(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[tuple[int, int]]:
    """First and last character of each token."""
    return list(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])
