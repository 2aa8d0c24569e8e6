"""Stage `capture` of a recipe without a head: text of every conversation in the SLM's own tokens; no hand-offs.

Files:
    answers.jsonl   as `stages.capture` writes it

A conversation that ends with the assistant's turn is taken as it stands; another is answered greedily by the recipe's
verifier, which may be the SLM itself. A base model, whose tokenizer has no chat template, reads plain text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hyco_export.core.data.conversations import Conversation, Message, asked_and_said
from hyco_export.core.data.prompts import prompt_named
from hyco_export.core.data.readers import read_conversations
from hyco_export.core.memory import release_freed
from hyco_export.errors import RecipeError
from hyco_export.models.capture import greedy_answer
from hyco_export.models.text.tokenizer import (
    encode_text,
    encode_turns,
    require_one_reading,
    require_rows,
    require_written,
)
from hyco_export.models.verifier import load_config, load_language_model, read_tokenizer
from hyco_export.stages.captured import ANSWERS_FILE, PROMPT_SPLITS, Answer, Split
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.table import CaptureTextConfig


def check(config: CaptureTextConfig, inputs: Mapping[str, Path]) -> None:
    """Every conversation through the verifier's template and tokenizer, before any stage works.

    Raises:
        RecipeError, CheckpointError: as `stages.capture.check`; a conversation without text.
    """
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
            require_written(tokenizer, [msgspec.to_builtins(message) for message in asked])
            require_rows(tokenizer, ids + encode_text(tokenizer, said or ""), rows)
    require_one_reading(tokenizer, inputs["verifier"], texts)
    del tokenizer
    release_freed()


def build(config: CaptureTextConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Encode or answer every conversation."""
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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    split: Split,
    conversation: Conversation,
) -> Answer:
    """The conversation's own last turn, or the model's greedy one; cut at the sequence limit.

    Raises: as `_prompt_and_room`.
    """
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
    config: CaptureTextConfig, tokenizer: PreTrainedTokenizerFast, split: Split, asked: tuple[Message, ...]
) -> tuple[list[int], int]:
    """Ids of what is asked, and how many tokens may follow.

    Raises:
        RecipeError: the template refuses it, or it alone reaches the sequence limit.
        CheckpointError: the template is none.
    """
    ids, limit = encode_turns(tokenizer, [msgspec.to_builtins(message) for message in asked]), config.capture
    if len(ids) >= limit.sequence_limit:
        raise RecipeError(
            f"a {split} prompt has {len(ids)} tokens, $.capture.sequence_limit is {limit.sequence_limit}",
            "raise the limit or remove the prompt",
        )
    return ids, limit.sequence_limit - len(ids)
