"""The plan of a chain: each stage's key, and whether its artifact is fresh or why it is built."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hyco_export.core.artifact import artifact_key, read_manifest, require_no_strays, verify
from hyco_export.errors import ArtifactError, RecipeError, StrayFileError
from hyco_export.stages.declarations import Source, Stage, version_changes
from hyco_export.stages.run_folder import RunFolder


@dataclass(frozen=True)
class PlannedStage:
    """One line of the plan: the artifact's key, and why it must be built ("" when it is fresh).

    `remark` says of a fresh one which libraries are no longer those that it was built with: versions are no part of a
    key, an upgrade alone does not cost hours of work.
    """

    stage: Stage
    folder: Path
    key: str
    input_keys: dict[str, str]
    source_digests: dict[str, str]
    reason: str
    remark: str = ""

    @property
    def fresh(self) -> bool:
        return not self.reason


def plan(run: RunFolder, stages: Sequence[Stage]) -> list[PlannedStage]:
    """The stages in order with their keys and whether each is fresh. Reads, builds nothing.

    Raises:
        CheckpointError, RecipeError: a checkpoint or data file is missing, or one file both calibrates and validates.
        StrayFileError: an artifact folder holds a file that is none of the artifact's.
    """
    planned: dict[str, PlannedStage] = {}
    digests: dict[Source, str] = {}
    for stage in stages:
        input_keys = {need: planned[need].key for need in stage.needs}
        sources = stage.sources(run.recipe)
        for name, source in sources.items():
            if source not in digests:
                digests[source] = run.digest(name, source)
        _require_apart(sources, digests)
        source_digests = {name: digests[source] for name, source in sources.items()}
        key = artifact_key(stage.name, stage.revision, stage.config(run.recipe), input_keys, source_digests)
        folder = run.folder(stage)
        stale_need = next((need for need in stage.needs if not planned[need].fresh), None)
        reason = f"{stale_need} is built anew" if stale_need else _staleness(folder, key)
        remark = "" if reason else _remark(folder)
        planned[stage.name] = PlannedStage(stage, folder, key, input_keys, source_digests, reason, remark)
    return list(planned.values())


def _require_apart(sources: Mapping[str, Source], digests: Mapping[Source, str]) -> None:
    """Figures on what calibrates prove nothing, however its path is spelt.

    Raises:
        RecipeError: the validation set has the bytes of the calibration set.
    """
    pair = [digests[sources[name]] for name in ("calibration", "validation") if name in sources]
    if len(pair) == 2 and pair[0] == pair[1]:
        raise RecipeError(
            "$.data.validation has the same content as $.data.calibration",
            "give other conversations to validate with: figures on calibrated prompts prove nothing",
        )


def _staleness(folder: Path, key: str) -> str:
    if not folder.exists():
        return "not built yet"
    try:
        manifest = verify(folder)
    except StrayFileError:
        raise  # hours of work are not done again for a file that the user can move
    except ArtifactError as error:
        return error.message
    return "" if manifest.key == key else "recipe, inputs or code changed"


def _remark(folder: Path) -> str:
    """Of a fresh artifact: other libraries than it was built with, and how to have it built with these."""
    changes = version_changes(read_manifest(folder).versions)
    return f"{changes}; to build it and what is made of it anew: rm -r {shlex.quote(str(folder))}" if changes else ""


def require_current(run: RunFolder, stages: Sequence[Stage]) -> None:
    """Every artifact must be of this recipe and this code. Reads manifests and names alone: no checkpoint, no file.

    Raises:
        ArtifactError: names the first stage that is missing, was built otherwise, or holds a file of somebody else.
    """
    for stage in stages:
        folder = run.folder(stage)
        manifest = read_manifest(folder)
        config = msgspec.json.decode(msgspec.json.encode(stage.config(run.recipe)))
        require_no_strays(folder, manifest)
        if manifest.revision != stage.revision or manifest.config != config:
            message = f"{folder} was built with other settings or code than recipe {run.recipe.name} asks for"
            raise ArtifactError(message, f"build it again: hyco-export {stage.name}")
