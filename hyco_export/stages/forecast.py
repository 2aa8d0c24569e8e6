"""The dry run: what each stage would do, and what it would take. Builds nothing and fetches nothing but small configs.

Works without checkpoints and data too: what is not on this machine is named as missing, and a checkpoint's shape taken
from its config on the Hub or from what is known of released models. Knows where shapes come from; the work that the
data make is `stages.expected_work`, the arithmetic `core.sizes`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.data.files import list_files
from hyco_export.core.data.reading import local_folders
from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.sizes.estimate import Estimate
from hyco_export.core.sizes.shapes import FamilyShape
from hyco_export.errors import RecipeError
from hyco_export.stages.checkpoints import require_generation, require_lengths
from hyco_export.stages.expected_work import expected_work
from hyco_export.stages.plan import plan
from hyco_export.stages.prechecks import check_sources
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.slm_surgery import rounding_of
from hyco_export.stages.stage import Stage
from hyco_export.stages.table import estimators_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def forecast(run: RunFolder, stages: Sequence[Stage]) -> Forecast:
    """Plan and estimate a chain.

    Raises:
        CheckpointError: a checkpoint that is here cannot be read, or asks for what cannot be honoured; or a local path
            of the recipe does not exist.
        StorageError: the run folder cannot be one.
        RecipeError: lengths that the verifier has no positions for, or data that cannot be used.
    """
    run.require_possible()
    folders = {role: _local(run, checkpoint) for role, checkpoint in checkpoints_of(run.recipe).items()}
    missing = _missing(run, folders)
    planned = [] if missing else plan(run, stages)
    reasons = _waiting(run, stages, missing) if missing else {item.stage.name: item.reason for item in planned}
    remarks = [f"{item.stage.name}: {item.remark}" for item in planned if item.remark] + _data_remarks(run, missing)
    notes: list[str] = []
    if None not in folders.values():
        check_sources(run, [stage for stage in stages if reasons[stage.name]], notes.append)
    elif folders["verifier"] is not None:
        require_lengths(run)
        require_generation(run, notes.append)
    family = _family(run.recipe, folders, notes)
    work = expected_work(run, folders["verifier"], notes)
    estimators = estimators_of(run.recipe)
    estimates = {stage.name: estimators[stage.name](run.recipe, family, work) if family else None for stage in stages}
    lines = (ForecastStage(stage, run.folder(stage), reasons[stage.name], estimates[stage.name]) for stage in stages)
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
    from hyco_export.nn.checkpoint import local_checkpoint

    return local_checkpoint(checkpoint, run.recipe_folder)


def _missing(run: RunFolder, folders: Mapping[str, Path | None]) -> dict[str, str]:
    """What is not on this machine, by source, with the next step."""
    from hyco_export.nn.checkpoint import next_step

    found = {}
    for role, checkpoint in checkpoints_of(run.recipe).items():
        if folders[role] is None:
            found[role] = f"{checkpoint.model} ({next_step(checkpoint, run.recipe_folder)})"
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


def _family(recipe: Recipe, folders: Mapping[str, Path | None], notes: list[str]) -> FamilyShape | None:
    """Shapes of the models; None when one is neither here nor known."""
    from hyco_export.nn import shapes

    configs = {}
    for role, checkpoint in checkpoints_of(recipe).items():
        config = _config(checkpoint, folders[role], notes)
        if config is None:
            notes.append(f"no estimates: nothing is known of {checkpoint.model}")
            return None
        configs[role] = config
    verifier_shape = shapes.verifier_shape if "head" in configs else shapes.language_model_shape
    family = FamilyShape(
        verifier_shape(configs["verifier"]),
        shapes.head_shape(configs["head"]) if "head" in configs else None,
        shapes.slm_shape(configs["slm"], rounding_of(recipe.slm.weights or None)),
    )
    if recipe.keepset.size is None:
        notes.append(f"$.keepset.coverage may keep all {family.verifier.vocab_size:,} tokens: only counting tells")
    return family


def _config(checkpoint: Checkpoint, folder: Path | None, notes: list[str]) -> "PreTrainedConfig | None":
    """The checkpoint's own config, else the Hub's, else what is known of a released model."""
    from hyco_export.nn.checkpoint import fetch_config
    from hyco_export.nn.known_configs import known_config
    from hyco_export.nn.verifier import load_config

    folder = folder or fetch_config(checkpoint.model, checkpoint.revision)
    if folder is not None:
        return load_config(folder)
    name = checkpoint.gguf_file or checkpoint.model
    config = known_config(name)
    if config is not None and (note := f"shape of {name}: as known here, its config is not at hand") not in notes:
        notes.append(note)
    return config
