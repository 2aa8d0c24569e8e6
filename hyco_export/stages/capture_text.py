"""Stage `capture` of a recipe without a head: text of every conversation in the SLM's own tokens; no hand-offs.

Files:
    answers.jsonl   as `stages.capture` writes it

A conversation that ends with the assistant's turn is taken as it stands; another is answered greedily by the recipe's
verifier, which may be the SLM itself. A base model, whose tokenizer has no chat template, reads plain text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core import recipe as recipes
from hyco_export.core.conversations import ASSISTANT_ROLES, Conversation, Message, require_known_roles
from hyco_export.core.data.files import read_conversations
from hyco_export.core.data.prompts import prompt_named
from hyco_export.core.heap import release_freed
from hyco_export.core.layout import CAPTURE
from hyco_export.errors import RecipeError
from hyco_export.stages.capture import ANSWERS_FILE, PROMPT_SPLITS, Answer, Split
from hyco_export.stages.stage import Metrics, Progress, Source, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class CaptureTextConfig(msgspec.Struct, frozen=True):
    """What changes the bytes."""

    capture: recipes.Capture
    dtype: recipes.Dtype


def config(recipe: recipes.Recipe) -> CaptureTextConfig:
    """The recipe's fields that this stage reads."""
    return CaptureTextConfig(recipe.capture, recipe.models.verifier.dtype)


def sources(recipe: recipes.Recipe) -> Mapping[str, Source]:
    """The verifier and the two prompt files."""
    return {
        "verifier": recipe.models.verifier,
        "calibration": recipe.data.calibration,
        "validation": recipe.data.validation,
    }


def check(config: CaptureTextConfig, inputs: Mapping[str, Path]) -> None:
    """Every conversation through the verifier's template and tokenizer, before any stage works.

    Raises:
        RecipeError, CheckpointError: as `stages.capture.check`; a conversation without text.
    """
    from hyco_export.nn.chat import encode_text, require_one_reading, require_rows
    from hyco_export.nn.verifier import load_config, read_tokenizer

    tokenizer = read_tokenizer(inputs["verifier"])
    rows = load_config(inputs["verifier"]).get_text_config().vocab_size
    texts: list[str] = []
    numbers = dict.fromkeys(PROMPT_SPLITS, 0)
    for split, conversation in _conversations(inputs):
        numbers[split] += 1
        texts += [message.content for message in conversation.messages]
        with prompt_named(f"$.data.{split}: {inputs[split]}", numbers[split], conversation):
            asked, said = asked_and_said(conversation)
            if not any(message.content.strip() for message in conversation.messages):
                raise RecipeError("it has no text", "remove it from the file")
            ids, _ = _prompt_and_room(config, tokenizer, split, asked)
            require_rows(tokenizer, ids + encode_text(tokenizer, said or ""), rows)
    require_one_reading(tokenizer, inputs["verifier"], texts)
    del tokenizer
    release_freed()


def build(config: CaptureTextConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Encode or answer every conversation."""
    from hyco_export.nn.verifier import load_language_model, read_tokenizer

    model = load_language_model(inputs["verifier"], config.dtype)
    tokenizer = read_tokenizer(inputs["verifier"])
    conversations = list(_conversations(inputs))
    sequences: dict[Split, int] = dict.fromkeys(PROMPT_SPLITS, 0)
    tokens: dict[Split, int] = dict.fromkeys(PROMPT_SPLITS, 0)
    with (out_dir / ANSWERS_FILE).open("wb") as lines:
        for done, (split, conversation) in enumerate(conversations, 1):
            answer = _answer(config, model, tokenizer, split, conversation)
            lines.write(msgspec.json.encode(answer) + b"\n")
            sequences[split] += 1
            tokens[split] += len(answer.prompt_ids) + len(answer.answer_ids)
            progress.step("conversations read or answered", done, len(conversations))
    return {"sequences": sequences, "tokens": tokens}


def _conversations(inputs: Mapping[str, Path]) -> Iterator[tuple[Split, Conversation]]:
    """All conversations of both files.

    Raises:
        RecipeError: a file holds none.
    """
    for split in (split for split in PROMPT_SPLITS if split in inputs):
        found = list(read_conversations(inputs[split]))
        if not found:
            raise RecipeError(f"$.data.{split}: {inputs[split]} holds no conversation", "give at least one")
        yield from ((split, conversation) for conversation in found)


def _answer(
    config: CaptureTextConfig,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    split: Split,
    conversation: Conversation,
) -> Answer:
    """The conversation's own last turn, or the model's greedy one; cut at the sequence limit.

    Raises: as `_prompt_and_room`.
    """
    from hyco_export.nn.capture import greedy_answer
    from hyco_export.nn.chat import encode_text

    limits = config.capture
    asked, said = asked_and_said(conversation)
    prompt_ids, room = _prompt_and_room(config, tokenizer, split, asked)
    if said is None:
        wanted = limits.max_new_tokens if split == "calibration" else limits.validation_max_new_tokens
        answer_ids = greedy_answer(model, prompt_ids, min(wanted, room))
    else:
        answer_ids = encode_text(tokenizer, said)[:room]
    text = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
    return Answer(conversation.id, split, asked, prompt_ids, answer_ids, text)


def _prompt_and_room(
    config: CaptureTextConfig, tokenizer: "PreTrainedTokenizerFast", split: Split, asked: tuple[Message, ...]
) -> tuple[list[int], int]:
    """Ids of what is asked, and how many tokens may follow.

    Raises:
        RecipeError: the template refuses it, or it alone reaches the sequence limit.
        CheckpointError: the template is none.
    """
    from hyco_export.nn.chat import encode_turns

    ids, limit = encode_turns(tokenizer, [msgspec.to_builtins(message) for message in asked]), config.capture
    if len(ids) >= limit.sequence_limit:
        raise RecipeError(
            f"a {split} prompt has {len(ids)} tokens, $.capture.sequence_limit is {limit.sequence_limit}",
            "raise the limit or remove the prompt",
        )
    return ids, limit.sequence_limit - len(ids)


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


STAGE = Stage(CAPTURE, revision=1, needs=(), config=config, sources=sources, build=build, check=check)
