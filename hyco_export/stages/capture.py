"""Stage `capture`: the verifier's answers to all prompts, and teacher-forced hand-offs of every sequence.

Greedy answers calibrate and validate; sampled ones (split `sampled`, if the recipe wants any) only train the head.

Files:
    answers.jsonl                             one line a prompt: id, split, messages, prompt_ids, answer_ids, text
    sequences/<split>-<index>.safetensors     `nn.capture.Capture` of prompt + answer, cut at the sequence limit
    final_norm.safetensors                    the verifier's final norm, for a head that is handed h from before it
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hyco_export.core import recipe as recipes
from hyco_export.core.conversations import Conversation, Message, prompt_messages, read_conversations
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.layout import CAPTURE, FINAL_NORM_FILE
from hyco_export.errors import ArtifactError, RecipeError
from hyco_export.stages.stage import Metrics, Progress, Source, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Split = Literal["calibration", "sampled", "validation"]
PROMPT_SPLITS: tuple[Split, ...] = ("calibration", "validation")
SPLITS: tuple[Split, ...] = ("calibration", "sampled", "validation")
ANSWERS_FILE = "answers.jsonl"
SEQUENCES_FOLDER = "sequences"


class Answer(msgspec.Struct, frozen=True):
    """One line of answers.jsonl."""

    id: str
    split: Split
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str


class CaptureConfig(msgspec.Struct, frozen=True):
    """What changes the bytes of a capture."""

    capture: recipes.Capture
    hidden_norm: HiddenNorm
    dtype: recipes.Dtype
    sampling: recipes.Sampling = recipes.Sampling()  # of the sampled answers


def config(recipe: recipes.Recipe) -> CaptureConfig:
    """The recipe's fields that this stage reads."""
    return CaptureConfig(recipe.capture, recipe.models.hidden_norm, recipe.models.verifier.dtype, recipe.sampling)


def sources(recipe: recipes.Recipe) -> Mapping[str, Source]:
    """The verifier and the two prompt files."""
    return {
        "verifier": recipe.models.verifier,
        "calibration": recipe.data.calibration,
        "validation": recipe.data.validation,
    }


def build(config: CaptureConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Answer every prompt, then capture its sequences; see the module for the files."""
    from hyco_export.nn.final_norm import final_norm, save_norm
    from hyco_export.nn.verifier import load_tokenizer, load_verifier

    prompts = list(_prompts(inputs))
    model = load_verifier(inputs["verifier"], config.dtype)
    tokenizer = load_tokenizer(inputs["verifier"])
    (out_dir / SEQUENCES_FOLDER).mkdir()
    save_norm(out_dir / FINAL_NORM_FILE, final_norm(model))
    counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    answer_tokens = dict.fromkeys(SPLITS, 0)
    tokens = size_bytes = 0
    with (out_dir / ANSWERS_FILE).open("wb") as lines:
        for done, (split, conversation) in enumerate(prompts):
            for answer in _answers(config, model, tokenizer, split, conversation, done):
                lines.write(msgspec.json.encode(answer) + b"\n")
                path = sequence_path(out_dir, answer.split, counts[answer.split])
                size_bytes += _capture(config, model, answer, path)
                counts[answer.split] += 1
                answer_tokens[answer.split] += len(answer.answer_ids)
                tokens += len(answer.prompt_ids) + len(answer.answer_ids)
            progress.step("prompts answered and captured", done + 1, len(prompts))
    return {"sequences": counts, "answer_tokens": answer_tokens, "tokens": tokens, "bytes": size_bytes}


def _answers(
    config: CaptureConfig,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    split: Split,
    conversation: Conversation,
    number: int,
) -> Iterator[Answer]:
    """The greedy answer to a prompt, then its sampled ones."""
    from hyco_export.nn import capture as capturing

    messages = prompt_messages(conversation)
    prompt_ids = capturing.encode_prompt(tokenizer, [msgspec.to_builtins(m) for m in messages])
    limit = _answer_limit(config, split, len(prompt_ids))

    def answer(kind: Split, ids: list[int]) -> Answer:
        return Answer(
            conversation.id, kind, messages, prompt_ids, ids, str(tokenizer.decode(ids, skip_special_tokens=True))
        )

    yield answer(split, capturing.greedy_answer(model, prompt_ids, limit))
    wanted = config.capture.sampled_answers
    if split == "calibration" and wanted:
        for ids in capturing.sampled_answers(model, prompt_ids, limit, wanted, config.sampling, number):
            yield answer("sampled", ids)


def _capture(config: CaptureConfig, model: "PreTrainedModel", answer: Answer, path: Path) -> int:
    """Capture one sequence; bytes written."""
    from hyco_export.nn import capture as capturing

    ids = (answer.prompt_ids + answer.answer_ids)[: config.capture.sequence_limit]
    captured = capturing.teacher_forced(model, ids, len(answer.prompt_ids), config.hidden_norm)
    return capturing.save_capture(path, captured)


def _prompts(inputs: Mapping[str, Path]) -> Iterator[tuple[Split, Conversation]]:
    for split in PROMPT_SPLITS:
        path = inputs[split]
        if not path.is_file():
            raise RecipeError(f"$.data.{split}: {path} does not exist", "correct the path")
        found = False
        for conversation in read_conversations(path):
            found = True
            yield split, conversation
        if not found:
            raise RecipeError(f"$.data.{split}: {path} holds no conversation", "give at least one prompt")


def _answer_limit(config: CaptureConfig, split: Split, prompt_tokens: int) -> int:
    """New tokens to generate: no more than fit the sequence limit, at least one.

    Raises:
        RecipeError: the prompt alone reaches the limit.
    """
    limit = config.capture
    room = limit.sequence_limit - prompt_tokens
    if room < 1:
        raise RecipeError(
            f"a {split} prompt has {prompt_tokens} tokens, $.capture.sequence_limit is {limit.sequence_limit}",
            "raise the limit or remove the prompt",
        )
    wanted = limit.max_new_tokens if split == "calibration" else limit.validation_max_new_tokens
    return min(wanted, room)


def sequence_path(folder: Path, split: Split, index: int) -> Path:
    """Where the capture of the index-th prompt of a split lies."""
    return folder / SEQUENCES_FOLDER / f"{split}-{index:04d}.safetensors"


def sequence_paths(folder: Path, split: Split) -> list[Path]:
    """All captures of a split, in prompt order.

    Raises:
        ArtifactError: there are none.
    """
    found = sorted((folder / SEQUENCES_FOLDER).glob(f"{split}-*.safetensors"))
    if not found:
        raise ArtifactError(f"{folder} holds no {split} captures", "build it again: hyco-export capture")
    return found


def training_paths(folder: Path) -> list[Path]:
    """Captures that train the head: of the greedy and of the sampled answers.

    Raises:
        ArtifactError: there are none.
    """
    sampled = sorted((folder / SEQUENCES_FOLDER).glob("sampled-*.safetensors"))
    return [*sequence_paths(folder, "calibration"), *sampled]


def read_answers(folder: Path, split: Split | None = None) -> list[Answer]:
    """Lines of answers.jsonl, of one split or all.

    Raises:
        ArtifactError: the file is missing or a line is not an answer.
    """
    path = folder / ANSWERS_FILE
    try:
        answers = [msgspec.json.decode(line, type=Answer) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build it again: hyco-export capture") from error
    return [answer for answer in answers if split is None or answer.split == split]


STAGE = Stage(CAPTURE, revision=1, needs=(), config=config, sources=sources, build=build)
