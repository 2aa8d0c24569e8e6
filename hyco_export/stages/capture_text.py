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
from hyco_export.core.conversations import ASSISTANT_ROLES, Conversation, Message
from hyco_export.core.data.files import read_conversations
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
    for split in PROMPT_SPLITS:
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

    Raises:
        RecipeError: a prompt that alone reaches the sequence limit.
    """
    from hyco_export.nn.capture import greedy_answer
    from hyco_export.nn.plain_text import encode_turns

    limits = config.capture
    asked, said = asked_and_said(conversation)
    prompt_ids = encode_turns(tokenizer, [msgspec.to_builtins(message) for message in asked])
    room = limits.sequence_limit - len(prompt_ids)
    if room < 1:
        raise RecipeError(
            f"a {split} prompt has {len(prompt_ids)} tokens, $.capture.sequence_limit is {limits.sequence_limit}",
            "raise the limit or remove the prompt",
        )
    if said is None:
        wanted = limits.max_new_tokens if split == "calibration" else limits.validation_max_new_tokens
        answer_ids = greedy_answer(model, prompt_ids, min(wanted, room))
    else:
        answer_ids = tokenizer(said, add_special_tokens=False).input_ids[:room]
    text = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
    return Answer(conversation.id, split, asked, prompt_ids, answer_ids, text)


def asked_and_said(conversation: Conversation) -> tuple[tuple[Message, ...], str | None]:
    """The turns before the assistant's last word, and that word; None where a question stands last."""
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last.role not in ASSISTANT_ROLES:
        return conversation.messages, None
    return conversation.messages[:-1], last.content.strip()


STAGE = Stage(CAPTURE, revision=1, needs=(), config=config, sources=sources, build=build)
