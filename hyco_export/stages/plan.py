"""The plan of a chain: each stage's key, and whether its artifact is fresh or why it is built: which field or file
changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.core.artifact import Manifest, artifact_key, read_manifest, require_no_strays, verify
from hyco_export.core.recipe import Checkpoint
from hyco_export.core.recipe_sections import as_source
from hyco_export.errors import ArtifactError, RecipeError, StrayFileError
from hyco_export.stages.declarations import Source, Stage, version_changes
from hyco_export.stages.run_folder import RunFolder

NOT_BUILT = "not built yet"
SHOWN_CHANGES = 3  # of a stage in one line of the plan
SHOWN_CHARS = 40  # of a value there
NOT_SET = "not set"


@dataclass(frozen=True)
class PlannedStage:
    """One line of the plan: the artifact's key, and why it must be built ("" when it is fresh).

    `remark` says of a fresh one which libraries are no longer those that it was built with: versions are no part of a
    key, an upgrade alone does not cost hours of work. `waits`: it must be built only because an artifact that it is
    made from is; where that turns out to have the bytes that it had, nothing is left to do.
    """

    stage: Stage
    folder: Path
    key: str
    input_keys: dict[str, str]
    source_digests: dict[str, str]
    reason: str
    remark: str = ""
    waits: bool = False

    @property
    def fresh(self) -> bool:
        return not self.reason


def plan(run: RunFolder, stages: Sequence[Stage], rebuild: bool = False) -> list[PlannedStage]:
    """The stages in order with their keys and whether each is fresh. Reads, builds nothing.

    Args:
        rebuild: what was built with other versions of libraries is built anew, too.

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
        item = PlannedStage(stage, run.folder(stage), key, input_keys, source_digests, reason="")
        planned[stage.name] = _judged(run, item, [need for need in stage.needs if not planned[need].fresh], rebuild)
    return list(planned.values())


def _judged(run: RunFolder, item: PlannedStage, stale: Sequence[str], rebuild: bool) -> PlannedStage:
    """The item with its reason or remark; `stale`: the artifacts it is made from that will be built anew."""
    own = why_stale(run, item, stale)
    libraries = "" if own else version_changes(read_manifest(item.folder).versions, item.stage.libraries)
    if libraries and rebuild:
        own = [libraries]
    reasons = own if own == [NOT_BUILT] else own + [f"input {need} is rebuilt" for need in stale]
    if libraries and not reasons:
        return replace(item, remark=f"{libraries}; to build it and what is made of it anew: --rebuild")
    return replace(item, reason=_listed(reasons), waits=bool(reasons) and not own)


def _listed(reasons: Sequence[str]) -> str:
    """One line, the first few and how many are left."""
    more = len(reasons) - SHOWN_CHANGES
    return ", ".join([*reasons[:SHOWN_CHANGES], *([f"and {more} more"] if more > 0 else [])])


def why_stale(run: RunFolder, item: PlannedStage, stale: Sequence[str] = ()) -> list[str]:
    """What of an artifact that lies there is not as the plan wants it, each in words; nothing of one that is fresh.

    Args:
        stale: stages that it is made from and whose artifacts there are not the final ones: they are not looked at.

    Raises:
        StrayFileError: a file in it is none of the artifact's: hours of work are not done again for a file that the
            user can move.
    """
    if not item.folder.exists():
        return [NOT_BUILT]
    try:
        manifest = verify(item.folder)
    except StrayFileError:
        raise
    except ArtifactError as error:
        return [error.message]
    if manifest.revision != item.stage.revision:
        return [f"code revision {manifest.revision} -> {item.stage.revision}"]
    changes = [*_changed_fields(manifest.config, item.stage.config(run.recipe)), *_changed_sources(run, item, manifest)]
    for need in item.stage.needs:
        if need not in stale and _was_rebuilt(run.root / need, manifest, item.input_keys[need], need):
            changes.append(f"input {need} was rebuilt")
    return changes or ([] if manifest.key == item.key or stale else ["made from other inputs"])


def _was_rebuilt(folder: Path, manifest: Manifest, key: str, need: str) -> bool:
    """Is the artifact in `folder` another one than `manifest`'s was made from? By its key, and by its bytes."""
    if manifest.inputs.get(need) != key:
        return True
    known = manifest.input_files.get(need)
    return known is not None and known != read_manifest(folder).files_digest


def is_unchanged(run: RunFolder, item: PlannedStage) -> bool:
    """Of a stage that waited, now that what it is made from lies there: is it fresh after all?"""
    return not why_stale(run, item) and read_manifest(item.folder).input_files.keys() >= set(item.stage.needs)


def _changed_fields(before: Any, config: msgspec.Struct) -> list[str]:
    """Each field of a configuration whose value is another one, by its place in the recipe."""
    old, new = (dict(_leaves(msgspec.json.decode(msgspec.json.encode(each)))) for each in (before, config))
    paths = list(dict.fromkeys([*new, *old]))
    return [
        f"{path} {_value(old, path)} -> {_value(new, path)}"
        for path in paths
        if old.get(path, msgspec.UNSET) != new.get(path, msgspec.UNSET)
        and not any(other.startswith(f"{path}.") for other in paths)  # an empty mapping that is filled, or was
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values that hold no other ones, with their dotted paths."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else name)


def _value(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return NOT_SET
    value = leaves[path]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _changed_sources(run: RunFolder, item: PlannedStage, manifest: Manifest) -> Iterator[str]:
    """Each checkpoint and data file with other contents; one that was not read before follows from a field."""
    for name, source in item.stage.sources(run.recipe).items():
        if name in manifest.sources and manifest.sources[name] != item.source_digests[name]:
            yield _source_words(name, source, manifest.origins.get(name))


def _source_words(name: str, source: Source, before: str | None) -> str:
    if isinstance(source, Checkpoint):
        was = "" if before in (None, source.model) else f", was {before}"
        return f"checkpoint models.{name} changed ({source.model}{was})"
    path = as_source(source).plain_path
    return f"data file {path} changed" if path else f"data.{name} changed"


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
