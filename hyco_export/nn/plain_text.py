"""Token ids of a conversation for any language model: by its chat template, or as plain text where it has none."""

from collections.abc import Mapping, Sequence
from typing import cast

from transformers import PreTrainedTokenizerFast

from hyco_export.nn.capture import encode_prompt

BETWEEN_TURNS = "\n\n"


def encode_turns(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids up to where the next word of the assistant begins; of no messages, what begins every text."""
    if tokenizer.chat_template is not None and messages:
        return encode_prompt(tokenizer, messages)
    text = "".join(message["content"].strip() + BETWEEN_TURNS for message in messages)
    return cast(list[int], tokenizer(text).input_ids)
