"""The dry run: what each stage would do, and what it would take. Builds nothing and fetches nothing but small configs.

Works without the checkpoints too: one that is not on this machine is named as missing, and its shape taken from its
config on the Hub or from what is known of released models. Knows where shapes and prompts come from; the arithmetic is
`core.sizes`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.sizes.estimate import Estimate, Split, Work
from hyco_export.core.sizes.shapes import FamilyShape
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.stages.runner import RunFolder, plan
from hyco_export.stages.stage import Stage
from hyco_export.stages.table import ESTIMATORS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

EMBEDDED_VERIFIER = "embedded:verifier"
ROLES = ("verifier", "head", "slm")
ANSWER_SHARE = 0.83  # of the limit that an answer fills: 25,625 tokens in 60 answers of at most 512 (Appendix A)
EMBEDDED_ANSWER_TOKENS = 55  # the embedded verifier's mean, 480 answers
MISSING_PROMPTS, MISSING_PROMPT_TOKENS = 60, 60  # of a set that is not here: Table 4's number, first turns of UltraChat
CHARACTERS_PER_TOKEN = 4  # of English, where the tokenizer is not here
TEMPLATE_TOKENS = 10  # of the chat template around a prompt


@dataclass(frozen=True)
class ForecastStage:
    """One line: why it must be built ("" when it is fresh), and what that takes (None where it cannot be told)."""

    stage: Stage
    folder: Path
    reason: str
    estimate: Estimate | None

    @property
    def fresh(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Forecast:
    """All stages; `missing`: what must be fetched first, each with how; `notes`: what the estimates assume."""

    stages: tuple[ForecastStage, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def forecast(run: RunFolder, stages: Sequence[Stage]) -> Forecast:
    """Plan and estimate a chain.

    Raises:
        CheckpointError: a checkpoint that is here cannot be read, or a local path of the recipe does not exist.
    """
    folders = {role: _local(run, getattr(run.recipe.models, role)) for role in ROLES}
    missing = _missing(run, folders)
    reasons = _waiting(run, stages, missing) if missing else {i.stage.name: i.reason for i in plan(run, stages)}
    notes: list[str] = []
    family = _family(run.recipe, folders, notes)
    work = _work(run, folders["verifier"], notes)
    estimates = {stage.name: ESTIMATORS[stage.name](run.recipe, family, work) if family else None for stage in stages}
    lines = (ForecastStage(stage, run.folder(stage), reasons[stage.name], estimates[stage.name]) for stage in stages)
    return Forecast(tuple(lines), tuple(missing.values()), tuple(notes))


def _local(run: RunFolder, checkpoint: Checkpoint) -> Path | None:
    from hyco_export.nn.checkpoint import local_checkpoint

    return local_checkpoint(checkpoint, run.recipe_folder)


def _missing(run: RunFolder, folders: Mapping[str, Path | None]) -> dict[str, str]:
    """What is not on this machine, by source, with the next step."""
    from hyco_export.nn.checkpoint import download_command

    found = {}
    for role, folder in folders.items():
        checkpoint = getattr(run.recipe.models, role)
        if folder is None:
            found[role] = f"{checkpoint.model} (run: {download_command(checkpoint.model, checkpoint.revision)})"
    data = run.recipe.data
    for name in ("calibration", "validation", "conversations"):
        try:
            run.source(name, getattr(data, name))
        except CheckpointError:
            found[name] = f"{getattr(data, name)} ($.data.{name})"
    return found


def _waiting(run: RunFolder, stages: Sequence[Stage], missing: Mapping[str, str]) -> dict[str, str]:
    """Reasons where something is missing: nothing can be called fresh without its key."""
    reasons: dict[str, str] = {}
    for stage in stages:
        absent = [name for name in stage.sources(run.recipe) if name in missing]
        needs = [need for need in stage.needs if need in reasons]
        reasons[stage.name] = f"needs {', '.join(absent)}" if absent else f"after {', '.join(needs) or 'the missing'}"
    return reasons


def _family(recipe: Recipe, folders: Mapping[str, Path | None], notes: list[str]) -> FamilyShape | None:
    """Shapes of the three; None when one is neither here nor known."""
    from hyco_export.nn import shapes

    configs = {}
    for role in ROLES:
        config = _config(getattr(recipe.models, role), folders[role], notes)
        if config is None:
            notes.append(f"no estimates: nothing is known of {getattr(recipe.models, role).model}")
            return None
        configs[role] = config
    return FamilyShape(
        shapes.verifier_shape(configs["verifier"]),
        shapes.head_shape(configs["head"]),
        shapes.slm_shape(configs["slm"]),
    )


def _config(checkpoint: Checkpoint, folder: Path | None, notes: list[str]) -> "PreTrainedConfig | None":
    """The checkpoint's own config, else the Hub's, else what is known of a released model."""
    from hyco_export.nn.checkpoint import fetch_config
    from hyco_export.nn.known_configs import known_config
    from hyco_export.nn.verifier import load_config

    folder = folder or fetch_config(checkpoint.model, checkpoint.revision)
    if folder is not None:
        return load_config(folder)
    config = known_config(checkpoint.model)
    if config is not None:
        notes.append(f"shape of {checkpoint.model}: as known here, its config could not be fetched")
    return config


def _work(run: RunFolder, verifier: Path | None, notes: list[str]) -> Work:
    """Prompts are counted where they are here; answers cannot be known before they are given."""
    limits, model = run.recipe.capture, run.recipe.models.verifier.model
    share = _answer_share(verifier)
    if share < 1 and model != EMBEDDED_VERIFIER:
        notes.append(f"answers are taken to fill {share:.0%} of $.capture's limits, as in the paper")

    def answer(limit: int) -> int:
        return min(limit, EMBEDDED_ANSWER_TOKENS) if model == EMBEDDED_VERIFIER else round(share * limit)

    tokenizer = _tokenizer(verifier)
    prompts, tokens = _prompts(run, "calibration", tokenizer, notes)
    calibration = Split(prompts, tokens, answer(limits.max_new_tokens))
    drawn = limits.sampled_answers
    sampled = Split(drawn * prompts, drawn * tokens, calibration.answer_tokens)
    held_out = _prompts(run, "validation", tokenizer, notes)
    return Work(calibration, sampled, Split(*held_out, answer(limits.validation_max_new_tokens)))


def _answer_share(verifier: Path | None) -> float:
    """1 for a model that never stops, as created ones do not."""
    if verifier is None:
        return ANSWER_SHARE
    from hyco_export.nn.verifier import load_config

    return ANSWER_SHARE if load_config(verifier).get_text_config().eos_token_id is not None else 1.0


def _tokenizer(verifier: Path | None) -> "PreTrainedTokenizerFast | None":
    if verifier is None:
        return None
    from hyco_export.nn.verifier import load_tokenizer

    return load_tokenizer(verifier)


def _prompts(
    run: RunFolder, name: str, tokenizer: "PreTrainedTokenizerFast | None", notes: list[str]
) -> tuple[int, int]:
    """Prompts of a set, and tokens of all of them together; estimated by their length where no tokenizer is here."""
    from hyco_export.core.conversations import prompt_messages
    from hyco_export.core.data.files import read_conversations
    from hyco_export.core.data.source import as_source

    reference = getattr(run.recipe.data, name)
    try:
        local = as_source(reference).path is not None  # others may have to be fetched
        path = run.source(name, reference) if local else None
    except (CheckpointError, RecipeError):
        path = None
    if path is None:
        notes.append(f"$.data.{name} is not here: {MISSING_PROMPTS} prompts of {MISSING_PROMPT_TOKENS} tokens assumed")
        return MISSING_PROMPTS, MISSING_PROMPTS * MISSING_PROMPT_TOKENS
    prompts = [[msgspec.to_builtins(m) for m in prompt_messages(c)] for c in read_conversations(path)]
    if tokenizer is None:
        characters = sum(len(message["content"]) for messages in prompts for message in messages)
        return len(prompts), characters // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS * len(prompts)
    from hyco_export.nn.capture import encode_prompt

    return len(prompts), sum(len(encode_prompt(tokenizer, messages)) for messages in prompts)
