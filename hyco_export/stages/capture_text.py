"""Stage `capture` of a recipe without a head: text of every conversation in the SLM's own tokens; no hand-offs.

Files:
    answers.jsonl   as `stages.capture` writes it

A conversation that ends with the assistant's turn is taken as it stands; another is answered greedily by the recipe's
verifier, which may be the SLM itself. A base model, whose tokenizer has no chat template, reads plain text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core import recipe as recipes
from hyco_export.core.artifact import CAPTURE, FINAL_NORM_FILE
from hyco_export.core.data.conversations import ASSISTANT_ROLES, Conversation, Message, require_known_roles
from hyco_export.core.data.prompts import prompt_named
from hyco_export.core.data.readers import read_conversations
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.memory import release_freed
from hyco_export.errors import ArtifactError, RecipeError
from hyco_export.stages.capture import ANSWERS_FILE, PROMPT_SPLITS, Answer, Split, read_answers
from hyco_export.stages.declarations import Metrics, Progress, Source, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from hyco_export.models.families.gemma4_assistant import HeadModel
    from hyco_export.models.head.unroll import RootRows


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
    from hyco_export.models.text.tokenizer import encode_text, require_one_reading, require_rows, require_written
    from hyco_export.models.verifier import load_config, read_tokenizer

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
    from hyco_export.models.verifier import load_language_model, read_tokenizer

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
    from hyco_export.models.capture import greedy_answer
    from hyco_export.models.text.tokenizer import encode_text

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
    from hyco_export.models.text.tokenizer import encode_turns

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


# What a head reads of a `capture` artifact: the rows of its sequences, after a check that h is what the head wants.


SIDE_SEQUENCES = 8  # hundreds of tokens: enough to tell which side of the norm h comes from


@dataclass(frozen=True)
class Reading:
    """How captured sequences are read: the first `limit` tokens, `window` positions visible, h from this side."""

    limit: int
    window: int
    hidden_norm: HiddenNorm


def captured_rows(capture: Path, paths: Sequence[Path], head: "HeadModel", reading: Reading) -> list["RootRows"]:
    """Response rows of captured sequences that have any, in their stored precision."""
    from hyco_export.models.capture import load_capture
    from hyco_export.models.head.unroll import head_spans, load_norm, response_rows

    norm = load_norm(capture / FINAL_NORM_FILE) if reading.hidden_norm == "pre" else None
    captures = [load_capture(path).cut(reading.limit) for path in paths]
    long_enough = [capture for capture in captures if capture.roots]
    return [response_rows(capture, head_spans(head.config), reading.window, norm) for capture in long_enough]


def require_norm_side(capture: Path, paths: Sequence[Path], head: "HeadModel", reading: Reading) -> None:
    """h comes from the side of the verifier's final norm that the recipe names, and the head wants it from there.

    Raises:
        GateError: it does not; names the cause.
    """
    from hyco_export.models.capture import load_capture
    from hyco_export.models.head.norm_side import OTHER, compare_readings, require_reading, require_side
    from hyco_export.models.head.unroll import load_norm

    few = paths[:SIDE_SEQUENCES]
    require_side(load_capture(few[0]).h, load_norm(capture / FINAL_NORM_FILE), reading.hidden_norm)
    mirrored = replace(reading, hidden_norm=OTHER[reading.hidden_norm])
    both = [captured_rows(capture, few, head, side) for side in (reading, mirrored)]
    require_reading(compare_readings(head, *both), reading.hidden_norm)


# What the SLM reads of a `capture` artifact: whole texts, prompt and answer. Hand-offs are the head's affair.


def captured_texts(capture: Path, split: Split, limit: int) -> list[list[int]]:
    """Prompt and answer ids of a split, each at most `limit`."""
    return [(answer.prompt_ids + answer.answer_ids)[:limit] for answer in read_answers(capture, split)]


def long_texts(texts: Sequence[list[int]], rows: int) -> list[list[int]]:
    """Those that fill at least one pass of `rows` tokens.

    Raises:
        ArtifactError: there are none.
    """
    long_enough = [ids for ids in texts if len(ids) >= rows]
    if not long_enough:
        raise ArtifactError(
            f"no captured text has {rows} tokens or more ($.slm.rows)",
            "raise $.capture.max_new_tokens or lower $.slm.rows, then: hyco-export capture",
        )
    return long_enough
