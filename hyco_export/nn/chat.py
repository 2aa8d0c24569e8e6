"""Token ids of a conversation for any language model: by its chat template, or as plain text where it has none.

Template and tokenizer are a checkpoint's files, the conversation is a user's: what they do not agree on is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from transformers import PreTrainedTokenizerFast

from hyco_export.errors import CheckpointError, RecipeError, first_line
from hyco_export.nn.tokenizer_file import open_tokenizer

BETWEEN_TURNS = "\n\n"
PROBE = "a"  # a text, to tell the tokens that a tokenizer puts before every text from the text's own


def encode_prompt(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation up to the opening of the model's turn, through the chat template.

    Raises:
        RecipeError: the template refuses the conversation.
        CheckpointError: it is no template, or writes no token.
    """
    turns = [dict(message) for message in messages]
    template = f"the chat template of {tokenizer.name_or_path}"
    try:
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{template}, line {error.lineno}: {error.message}", "correct the template") from error
    except Exception as error:  # a template may call anything; raise_exception gives TemplateError
        roles = ", ".join(message["role"] for message in messages)
        own_words = isinstance(error, TemplateError) and not isinstance(error, UndefinedError)
        detail = first_line(error) if own_words else f"{type(error).__name__}: {first_line(error)}"
        raise RecipeError(
            f"{template} refuses turns of {roles}: {detail}",
            "correct or remove the conversation, or use a checkpoint whose template takes it",
        ) from error
    if not ids:
        raise CheckpointError(f"{template} writes nothing for a conversation", "correct the template")
    return cast(list[int], ids)


def encode_turns(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids up to where the next word of the assistant begins; of no messages, what begins every text.

    Raises: as `encode_prompt`.
    """
    if tokenizer.chat_template is not None and messages:
        return encode_prompt(tokenizer, messages)
    text = "".join(message["content"].strip() + BETWEEN_TURNS for message in messages)
    return _opening(tokenizer) + encode_text(tokenizer, text)


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text alone."""
    return cast(list[int], tokenizer(text, add_special_tokens=False).input_ids)


def _opening(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What a tokenizer puts before every text; what it puts behind (`add_eos_token`) would end what is to go on."""
    whole, bare = cast(list[int], tokenizer(PROBE).input_ids), encode_text(tokenizer, PROBE)
    starts = (first for first in range(len(whole)) if whole[first : first + len(bare)] == bare)
    return whole[: next(starts, 0)]


def require_rows(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], rows: int) -> None:
    """Every id has a row of the model's embedding.

    Raises:
        CheckpointError: the tokenizer knows more tokens than the model, and the text has one of them.
    """
    beyond = max(ids, default=0)
    if beyond >= rows:
        raise CheckpointError(
            f"{tokenizer.convert_ids_to_tokens(beyond)!r} is token {beyond:,}, but the model has {rows:,} rows",
            "take it out of the conversation, or use the tokenizer that was saved with the model",
        )


def require_one_reading(tokenizer: PreTrainedTokenizerFast, folder: Path, texts: Sequence[str]) -> None:
    """The checkpoint's tokenizer.json, which counts, and transformers' tokenizer, which asks, give equal ids.

    Raises:
        CheckpointError: they do not: another file of the checkpoint changes what transformers makes of it.
    """
    counting = open_tokenizer(folder).backend.encode_batch(list(texts), add_special_tokens=False)
    for text, encoding in zip(texts, counting, strict=True):
        asked = encode_text(tokenizer, text)
        if asked != encoding.ids:
            raise CheckpointError(
                f"{folder / 'tokenizer.json'} gives {len(encoding.ids)} tokens for {text[:40]!r}, transformers "
                f"({type(tokenizer).__name__}) gives {len(asked)} others",
                "save it anew from the one that is right: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
