"""The dry run: what each stage would do, and what it would take. Builds nothing and fetches nothing but small configs.

Works without checkpoints and data too: what is not on this machine is named as missing, and a checkpoint's shape taken
from its config on the Hub or from what is known of released models. What
the data amount to is counted below; the arithmetic is `core.estimates`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
from transformers import PreTrainedConfig

from hyco_export.core.data.conversations import Conversation, asked_and_said, identities, prompt_messages
from hyco_export.core.data.prompts import prompt_named, require_apart, require_counted, require_usable
from hyco_export.core.data.readers import list_files
from hyco_export.core.data.sources import local_folders
from hyco_export.core.estimates.shapes import FamilyShape
from hyco_export.core.estimates.stages import Estimate, Split, Work
from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.recipe_sections import Reference, as_source
from hyco_export.errors import RecipeError
from hyco_export.models import shapes
from hyco_export.models.checkpoints import fetch_config, local_checkpoint, next_step
from hyco_export.models.families.released_configs import known_config
from hyco_export.models.text.tokenizer import encode_prompt, encode_text, encode_turns, require_rows
from hyco_export.models.verifier import load_config, load_tokenizer, read_tokenizer
from hyco_export.stages.captured import PROMPT_SPLITS
from hyco_export.stages.checks import check_sources, require_generation, require_lengths
from hyco_export.stages.declarations import Stage
from hyco_export.stages.parts.slm_surgery import rounding_of
from hyco_export.stages.plan import plan
from hyco_export.stages.run_folder import RunFolder

# What a recipe's data amount to before anything runs: prompts are counted where they are at hand, answers expected.


EMBEDDED_VERIFIER = "embedded:verifier"
ANSWER_SHARE = 0.83  # of the limit that an answer fills: 25,625 tokens in 60 answers of at most 512 (Appendix A)
EMBEDDED_ANSWER_TOKENS = 55  # the embedded verifier's mean, 480 answers
MISSING_PROMPTS, MISSING_PROMPT_TOKENS = 60, 60  # of a set that is not here: Table 4's number, first turns of UltraChat
MISSING_CONVERSATIONS = 20_000  # §3.3
CHARACTERS_PER_TOKEN = 4  # of English, where the tokenizer is not here
TEMPLATE_TOKENS = 10  # of the chat template around a prompt

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Counter:
    """Tokens of a prompt as `capture` gives it to the verifier, and of plain text."""

    prompt: Callable[[Messages], int]
    text: Callable[[str], int]


def expected_work(run: RunFolder, verifier: Path | None, notes: list[str]) -> Work:
    """Sequences and tokens of each split; `verifier` is its folder where it is here, `notes` gets what is assumed."""
    limits, model = run.recipe.capture, run.recipe.models.verifier.model
    share = _answer_share(verifier)
    if share < 1 and model != EMBEDDED_VERIFIER:
        notes.append(f"answers are taken to fill {share:.0%} of $.capture's limits, as in the paper")

    def answer(limit: int) -> int:
        return min(limit, EMBEDDED_ANSWER_TOKENS) if model == EMBEDDED_VERIFIER else round(share * limit)

    count = _counter(run, verifier)
    calibration = _split(run, "calibration", count, answer(limits.max_new_tokens), notes)
    validation = _split(run, "validation", count, answer(limits.validation_max_new_tokens), notes)
    drawn = limits.sampled_answers if run.recipe.models.head else 0
    sampled = Split(drawn * calibration.sequences, drawn * calibration.prompt_tokens, calibration.answer_tokens)
    return Work(calibration, sampled, validation, _conversations(run, notes))


def _conversations(run: RunFolder, notes: list[str]) -> int:
    """How many the keep set reads."""
    reference = run.recipe.data.conversations
    found = _at_hand(run, "conversations", reference)
    if found is not None:
        sets = (_at_hand(run, name, getattr(run.recipe.data, name)) for name in PROMPT_SPLITS)
        asked = identities(chain.from_iterable(each for each in sets if each is not None))
        total, remarks = require_counted(found, _field("conversations", reference), asked)
        notes += remarks
        return total
    if (limit := as_source(reference).limit) is not None:
        return limit
    notes.append(f"$.data.conversations is not here: {MISSING_CONVERSATIONS:,} assumed")
    return MISSING_CONVERSATIONS


def _answer_share(verifier: Path | None) -> float:
    """1 for a model that never stops, as created ones do not."""
    if verifier is None:
        return ANSWER_SHARE

    return ANSWER_SHARE if load_config(verifier).get_text_config().eos_token_id is not None else 1.0


def _counter(run: RunFolder, verifier: Path | None) -> Counter:
    """By the verifier's tokenizer, or by length where it is not here."""
    if verifier is None:
        return Counter(_prompt_by_length, lambda text: len(text) // CHARACTERS_PER_TOKEN)

    with_head = run.recipe.models.head is not None
    tokenizer = load_tokenizer(verifier) if with_head else read_tokenizer(verifier)
    encode = encode_prompt if with_head else encode_turns
    rows = load_config(verifier).get_text_config().vocab_size

    def prompt(messages: Messages) -> int:
        ids = encode(tokenizer, messages)
        require_rows(tokenizer, ids, rows)
        return len(ids)

    return Counter(prompt, lambda text: len(encode_text(tokenizer, text)))


def _prompt_by_length(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages) // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS


def _at_hand(run: RunFolder, name: str, reference: Reference) -> Iterator[Conversation] | None:
    """None for what is on the Hub or nowhere."""
    try:
        return run.at_hand(name, reference)
    except RecipeError:
        return None


def _field(name: str, reference: Reference) -> str:
    """A source's place in the recipe, and its path where it is one."""
    path = as_source(reference).path
    return f"$.data.{name}: {path}" if path else f"$.data.{name}"


def _split(run: RunFolder, name: str, count: Counter, answer_tokens: int, notes: list[str]) -> Split:
    """A prompt set. Without a head, `capture` takes an answer that is written there already."""
    reference = getattr(run.recipe.data, name)
    found = _at_hand(run, name, reference)
    if found is None:
        prompts = as_source(reference).limit or MISSING_PROMPTS
        notes.append(f"$.data.{name} is not here: {prompts} prompts of {MISSING_PROMPT_TOKENS} tokens assumed")
        return Split(prompts, prompts * MISSING_PROMPT_TOKENS, answer_tokens)
    with_head = run.recipe.models.head is not None
    limit = run.recipe.capture.sequence_limit
    field = _field(name, reference)
    answers, prompt_tokens = [], 0
    for number, item in enumerate(found, 1):
        with prompt_named(field, number, item):
            asked, said = (prompt_messages(item), None) if with_head else asked_and_said(item)
            prompt_tokens += count.prompt([msgspec.to_builtins(message) for message in asked])
            answers.append(answer_tokens if said is None else min(count.text(said), limit))
    if not answers:
        raise RecipeError(f"{field} holds no conversation", "give at least one prompt")
    return Split(len(answers), prompt_tokens, round(sum(answers) / len(answers)))


def _require_prompts(run: RunFolder) -> None:
    """What a run asks of its two prompt sets before it works, where both are at hand.

    Raises:
        RecipeError: as `core.data.prompts.require_prompts`.
    """
    sets = []
    for name in PROMPT_SPLITS:
        reference = getattr(run.recipe.data, name)
        if (found := _at_hand(run, name, reference)) is None:
            return
        sets.append(require_usable(list(found), _field(name, reference)))
    calibration, validation = sets
    place = _field("validation", run.recipe.data.validation)
    require_apart(calibration, validation, run.recipe.validation.prompts, place)


ROLES = ("verifier", "head", "slm")
DATA = ("calibration", "validation", "conversations")


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
    """All stages; `missing`: what must be fetched first, each with how; `notes`: what the estimates assume; `remarks`:
    what a reader of the plan should know of data and artifacts."""

    stages: tuple[ForecastStage, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def forecast(run: RunFolder, stages: Sequence[Stage], rebuild: bool = False) -> Forecast:
    """Plan and estimate a chain; `rebuild` as in `plan`.

    Raises:
        CheckpointError: a checkpoint that is here cannot be read, or asks for what cannot be honoured; or a local path
            of the recipe does not exist.
        StorageError: the run folder cannot be one.
        RecipeError: lengths that the verifier has no positions for, or data that cannot be used.
    """
    run.require_possible()
    folders = {role: _local(run, checkpoint) for role, checkpoint in checkpoints_of(run.recipe).items()}
    missing = _missing(run, folders)
    planned = [] if missing else plan(run, stages, rebuild)
    reasons = _waiting(run, stages, missing) if missing else {item.stage.name: item.reason for item in planned}
    remarks = [f"{item.stage.name}: {item.remark}" for item in planned if item.remark] + _data_remarks(run, missing)
    notes: list[str] = []
    if any(reasons.values()):
        _require_prompts(run)
    if None not in folders.values():
        check_sources(run, [stage for stage in stages if reasons[stage.name]], notes.append)
    elif folders["verifier"] is not None:
        require_lengths(run)
        require_generation(run, notes.append)
    family, known = _family(run.recipe, folders, notes)
    missing |= {role: f"{missing[role]}; {how}" for role, how in known.items() if role in missing}
    work = expected_work(run, folders["verifier"], notes)
    lines = (
        ForecastStage(
            stage, run.folder(stage), reasons[stage.name], stage.estimate(run.recipe, family, work) if family else None
        )
        for stage in stages
    )
    return Forecast(tuple(lines), tuple(missing.values()), tuple(notes), tuple(remarks))


def _data_remarks(run: RunFolder, missing: Mapping[str, str]) -> list[str]:
    """What lies in the data folders that are here and is not read."""
    remarks = []
    for name in (name for name in DATA if name not in missing):
        for folder in local_folders(getattr(run.recipe.data, name), run.recipe_folder):
            if remark := list_files(folder).remark:
                remarks.append(f"$.data.{name}: {remark}")
    return remarks


def checkpoints_of(recipe: Recipe) -> dict[str, Checkpoint]:
    """The recipe's checkpoints by role."""
    named = {role: getattr(recipe.models, role) for role in ROLES}
    return {role: checkpoint for role, checkpoint in named.items() if checkpoint is not None}


def _local(run: RunFolder, checkpoint: Checkpoint) -> Path | None:

    return local_checkpoint(checkpoint, run.recipe_folder)


def _missing(run: RunFolder, folders: Mapping[str, Path | None]) -> dict[str, str]:
    """What is not on this machine, by source, with the next step."""
    found = {}
    for role, checkpoint in checkpoints_of(run.recipe).items():
        if folders[role] is None:
            step = next_step(checkpoint, run.recipe_folder)
            found[role] = f"{checkpoint.model} is not on this machine ({step})"
    for name in DATA:
        try:
            run.at_hand(name, getattr(run.recipe.data, name))
        except RecipeError as error:
            found[name] = error.message
    return found


def _waiting(run: RunFolder, stages: Sequence[Stage], missing: Mapping[str, str]) -> dict[str, str]:
    """Reasons where something is missing: nothing can be called fresh without its key."""
    reasons: dict[str, str] = {}
    for stage in stages:
        absent = [name for name in stage.sources(run.recipe) if name in missing]
        needs = [need for need in stage.needs if need in reasons]
        reasons[stage.name] = f"needs {', '.join(absent)}" if absent else f"after {', '.join(needs) or 'the missing'}"
    return reasons


def _family(
    recipe: Recipe, folders: Mapping[str, Path | None], notes: list[str]
) -> tuple[FamilyShape | None, dict[str, str]]:
    """Shapes of the models, None when one is neither here nor known; and where those that are not here come from."""
    configs, known = {}, {}
    for role, checkpoint in checkpoints_of(recipe).items():
        config, known[role] = _config(checkpoint, folders[role])
        if config is None:
            notes.append(f"no estimates: nothing is known of {checkpoint.model}")
            return None, known
        configs[role] = config
    verifier_shape = shapes.verifier_shape if "head" in configs else shapes.language_model_shape
    family = FamilyShape(
        verifier_shape(configs["verifier"]),
        shapes.head_shape(configs["head"]) if "head" in configs else None,
        shapes.slm_shape(configs["slm"], rounding_of(recipe.slm.weights or None)),
    )
    if recipe.keepset.size is None:
        notes.append(f"$.keepset.coverage may keep all {family.verifier.vocab_size:,} tokens: only counting tells")
    return family, known


def _config(checkpoint: Checkpoint, folder: Path | None) -> tuple[PreTrainedConfig | None, str]:
    """The checkpoint's own config, else the Hub's, else what is known of a released model; and which, in words."""
    if folder is not None:
        return load_config(folder), "sizes from its config"
    if (fetched := fetch_config(checkpoint.model, checkpoint.revision)) is not None:
        return load_config(fetched), "sizes from its config on the Hub"
    name = checkpoint.gguf_file or checkpoint.model
    config = known_config(name)
    return config, f"sizes assumed: those known of {name}" if config else "sizes unknown"
