"""Stage `capture`: the verifier's answers to all prompts, and teacher-forced hand-offs of every sequence.

Greedy answers calibrate and validate; sampled ones (split `sampled`, if the recipe wants any) only train the head.

Files:
    answers.jsonl                             one line a prompt: id, split, messages, prompt_ids, answer_ids, text
    sequences/<split>-<index>.safetensors     `models.capture.Capture` of prompt + answer, cut at the sequence limit
    trees/validation-<index>.json             `core.golden.GoldenTree` of an answer that is long enough
    final_norm.safetensors                    the verifier's final norm, for a head that is handed h from before it

A prompt is a unit of work (`core.artifact`): a killed build loses the prompts in flight, and the processes of a launch
take every n-th prompt each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hyco_export.core.artifact import FINAL_NORM_FILE, PartialBuild
from hyco_export.core.data.conversations import Conversation, prompt_messages
from hyco_export.core.data.prompts import prompt_named, read_prompts
from hyco_export.core.data.readers import list_files
from hyco_export.core.files import write_json
from hyco_export.core.golden import GoldenTree
from hyco_export.core.memory import release_freed
from hyco_export.errors import ArtifactError, RecipeError
from hyco_export.models.capture import greedy_answer, sampled_answers, save_capture, teacher_forced
from hyco_export.models.golden_tree import golden_tree
from hyco_export.models.head.unroll import final_norm, save_norm
from hyco_export.models.process_group import current_group
from hyco_export.models.text.tokenizer import encode_prompt, require_one_reading, require_rows, require_written
from hyco_export.models.verifier import handoff_values, load_config, load_tokenizer, load_verifier
from hyco_export.stages.captured import (
    ANSWERS_FILE,
    PROMPT_SPLITS,
    SEQUENCES_FOLDER,
    SPLITS,
    TREES_FOLDER,
    Answer,
    Split,
    sequence_name,
)
from hyco_export.stages.declarations import Metrics, Progress
from hyco_export.stages.table import CaptureConfig

NORM_UNIT = "final-norm"


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer: the `index`-th of its split, the `number`-th of all."""

    split: Split
    index: int
    number: int
    conversation: Conversation

    @property
    def unit(self) -> str:
        """Name of its unit of work."""
        return f"{self.split}-{self.index:04d}"


def check(config: CaptureConfig, inputs: Mapping[str, Path]) -> None:
    """Every prompt through the verifier's template and tokenizer, before any stage works.

    Raises:
        RecipeError: a prompt that the template refuses or that fills the sequence limit; says which.
        CheckpointError: a tokenizer or template that cannot be read, that does not fit the model, of which transformers
            makes another one, or that writes something else than the messages.
    """
    tokenizer = load_tokenizer(inputs["verifier"])
    rows = load_config(inputs["verifier"]).get_text_config().vocab_size
    texts: list[str] = []
    for prompt in _prompts(inputs):
        messages = prompt_messages(prompt.conversation)
        texts += [message.content for message in messages]
        with prompt_named(f"$.data.{prompt.split}: {inputs[prompt.split]}", prompt.index + 1, prompt.conversation):
            turns = [msgspec.to_builtins(message) for message in messages]
            ids = encode_prompt(tokenizer, turns)
            require_written(tokenizer, turns)
            require_rows(tokenizer, ids, rows)
            _answer_limit(config, prompt.split, len(ids))
    require_one_reading(tokenizer, inputs["verifier"], texts)
    del tokenizer
    release_freed()


def build(config: CaptureConfig, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> Metrics:
    """Answer every prompt, then capture its sequences; see the module for the files."""
    group = current_group()
    partial = PartialBuild(out_dir)
    prompts = list(_prompts(inputs))
    own = group.share(prompts)
    missing = [prompt for prompt in own if partial.finished(prompt.unit) is None]
    if group.main and len(missing) < len(own):
        progress.note(f"  going on: {len(own) - len(missing)} of {len(own)} prompts are done")
    _capture_prompts(config, inputs, partial, missing, progress)
    group.wait()
    if not group.main:
        return {}
    per_round, per_token = handoff_values(load_config(inputs["verifier"]))
    files = {split: list_files(inputs[split]).counts for split in PROMPT_SPLITS}
    return {
        **_gather(partial, prompts),
        "handoff_values": {"round": per_round, "token": per_token},
        "data_files": files,
    }


def _capture_prompts(
    config: CaptureConfig,
    inputs: Mapping[str, Path],
    partial: PartialBuild,
    prompts: Sequence[Prompt],
    progress: Progress,
) -> None:
    """Do the units of these prompts, one after the other; the model is not loaded where nothing is left to do."""
    if not prompts and partial.finished(NORM_UNIT):
        return
    group = current_group()
    model = load_verifier(inputs["verifier"], config.dtype, group.model_device)
    tokenizer = load_tokenizer(inputs["verifier"])
    with partial.place(FINAL_NORM_FILE) as draft:  # a few KB: every process writes the same
        save_norm(draft, final_norm(model))
    partial.finish(NORM_UNIT, [FINAL_NORM_FILE])
    for done, prompt in enumerate(prompts, 1):
        _capture_prompt(config, model, tokenizer, partial, prompt)
        progress.step("prompts answered and captured", done, len(prompts))


def _capture_prompt(
    config: CaptureConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    partial: PartialBuild,
    prompt: Prompt,
) -> None:
    """Write the captures of all answers to a prompt, then the receipt that makes them a finished unit."""
    names, answers = [], []
    for position, answer in enumerate(_answers(config, model, tokenizer, prompt)):
        first = prompt.index * config.capture.sampled_answers  # of the sampled ones, which follow the greedy one
        index = prompt.index if answer.split == prompt.split else first + position - 1
        name = f"{SEQUENCES_FOLDER}/{sequence_name(answer.split, index)}"
        with partial.place(name) as draft:
            _capture(config, model, answer, draft)
        names.append(name)
        answers.append(answer)
        if answer.split == "validation" and (tree := _golden_tree(config, model, answer)):
            names.append(f"{TREES_FOLDER}/validation-{prompt.index:04d}.json")
            with partial.place(names[-1]) as draft:
                write_json(draft, tree)
    partial.finish(prompt.unit, names, answers)


def _gather(partial: PartialBuild, prompts: Sequence[Prompt]) -> Metrics:
    """Write answers.jsonl from the finished units, in the order of the prompts; the metrics.

    Raises:
        ArtifactError: a unit is not finished: a process of the launch did not see the same folder.
    """
    counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    answer_tokens = dict.fromkeys(SPLITS, 0)
    tokens = size_bytes = 0
    with partial.place(ANSWERS_FILE) as draft, draft.open("wb") as lines:
        for prompt in prompts:
            receipt = partial.finished(prompt.unit)
            if receipt is None:
                raise ArtifactError(
                    f"the capture of prompt {prompt.conversation.id!r} is missing or damaged in {partial.build_dir}",
                    "all processes of a launch need the same run folder; run the command again to go on",
                )
            for answer in msgspec.convert(receipt.note, list[Answer]):
                lines.write(msgspec.json.encode(answer) + b"\n")
                counts[answer.split] += 1
                answer_tokens[answer.split] += len(answer.answer_ids)
                tokens += len(answer.prompt_ids) + len(answer.answer_ids)
            size_bytes += sum(record.size_bytes for record in receipt.files.values())
    return {"sequences": counts, "answer_tokens": answer_tokens, "tokens": tokens, "bytes": size_bytes}


def _answers(
    config: CaptureConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: Prompt
) -> Iterator[Answer]:
    """The greedy answer to a prompt, then its sampled ones."""
    messages = prompt_messages(prompt.conversation)
    prompt_ids = encode_prompt(tokenizer, [msgspec.to_builtins(m) for m in messages])
    limit = _answer_limit(config, prompt.split, len(prompt_ids))

    def answer(kind: Split, ids: list[int]) -> Answer:
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        return Answer(prompt.conversation.id, kind, messages, prompt_ids, ids, text)

    yield answer(prompt.split, greedy_answer(model, prompt_ids, limit))
    wanted = config.capture.sampled_answers
    if prompt.split == "calibration" and wanted:
        for ids in sampled_answers(model, prompt_ids, limit, wanted, config.sampling, prompt.number):
            yield answer("sampled", ids)


def _capture(config: CaptureConfig, model: PreTrainedModel, answer: Answer, path: Path) -> None:
    """Capture one sequence."""
    ids = (answer.prompt_ids + answer.answer_ids)[: config.capture.sequence_limit]
    captured = teacher_forced(model, ids, len(answer.prompt_ids), config.hidden_norm)
    save_capture(path, captured)


def _golden_tree(config: CaptureConfig, model: PreTrainedModel, answer: Answer) -> GoldenTree | None:
    """Probabilities behind a place of the answer; None where it is too short."""
    ids = (answer.prompt_ids + answer.answer_ids)[: config.capture.sequence_limit]
    return golden_tree(model, ids, len(answer.prompt_ids), config.sampling)


def _prompts(inputs: Mapping[str, Path]) -> Iterator[Prompt]:
    number = 0
    for split in (split for split in PROMPT_SPLITS if split in inputs):
        for index, conversation in enumerate(read_prompts(inputs[split], f"$.data.{split}")):
            yield Prompt(split, index, number, conversation)
            number += 1


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
