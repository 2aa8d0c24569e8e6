"""The runner: plans a chain of stages, reuses what is fresh, builds the rest, publishes each result at once.

Knows the order, keys, locks and folders; not what a stage computes. One run folder holds one artifact per stage
(`<stage>`, or `<stage>@<target>` where a target changes the bytes).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.artifact import Manifest, artifact_key, publish, read_manifest, verify
from hyco_export.core.data.prompts import require_prompts
from hyco_export.core.data.reading import OnCount
from hyco_export.core.data.source import as_source
from hyco_export.core.heap import release_freed
from hyco_export.core.memory import measured
from hyco_export.core.recipe import Checkpoint
from hyco_export.core.storage import said_of
from hyco_export.errors import ArtifactError
from hyco_export.stages.build_folder import build_folder, sweep
from hyco_export.stages.checkpoints import note_unpinned, origins, require_full_precision
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.stage import Progress, Silent, Source, Stage

if TYPE_CHECKING:
    from hyco_export.nn.crew import Crew

LIBRARIES = ("torch", "transformers", "aimet-torch", "onnx", "onnxruntime", "onnxruntime-qnn", "numpy")


@dataclass(frozen=True)
class PlannedStage:
    """One line of the plan: the artifact's key, and why it must be built ("" when it is fresh)."""

    stage: Stage
    folder: Path
    key: str
    input_keys: dict[str, str]
    source_digests: dict[str, str]
    reason: str

    @property
    def fresh(self) -> bool:
        return not self.reason


def plan(run: RunFolder, stages: Sequence[Stage]) -> list[PlannedStage]:
    """The stages in order with their keys and whether each is fresh. Reads, builds nothing.

    Raises:
        CheckpointError, RecipeError: a checkpoint or data file is missing.
    """
    planned: dict[str, PlannedStage] = {}
    digests: dict[Source, str] = {}
    for stage in stages:
        input_keys = {need: planned[need].key for need in stage.needs}
        sources = stage.sources(run.recipe)
        for name, source in sources.items():
            if source not in digests:
                digests[source] = run.digest(name, source)
        source_digests = {name: digests[source] for name, source in sources.items()}
        key = artifact_key(stage.name, stage.revision, stage.config(run.recipe), input_keys, source_digests)
        folder = run.folder(stage)
        stale_need = next((need for need in stage.needs if not planned[need].fresh), None)
        reason = f"{stale_need} is built anew" if stale_need else _staleness(folder, key)
        planned[stage.name] = PlannedStage(stage, folder, key, input_keys, source_digests, reason)
    return list(planned.values())


def _staleness(folder: Path, key: str) -> str:
    if not folder.exists():
        return "not built yet"
    try:
        manifest = verify(folder)
    except ArtifactError as error:
        return error.message
    return "" if manifest.key == key else "recipe, inputs or code changed"


def require_current(run: RunFolder, stages: Sequence[Stage]) -> None:
    """Every artifact must be of this recipe and this code. Reads manifests alone: no checkpoint, no artifact file.

    Raises:
        ArtifactError: names the first stage that is missing or was built otherwise.
    """
    for stage in stages:
        folder = run.folder(stage)
        manifest = read_manifest(folder)
        config = msgspec.json.decode(msgspec.json.encode(stage.config(run.recipe)))
        if manifest.revision != stage.revision or manifest.config != config:
            message = f"{folder} was built with other settings or code than recipe {run.recipe.name} asks for"
            raise ArtifactError(message, f"build it again: hyco-export {stage.name}")


def chain_to(stages: Sequence[Stage], last: str) -> list[Stage]:
    """The stages that `last` needs, itself included, in table order."""
    by_name = {stage.name: stage for stage in stages}
    wanted, queue = set(), [last]
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue.extend(by_name[name].needs)
    return [stage for stage in stages if stage.name in wanted]


def build_all(run: RunFolder, stages: Sequence[Stage], progress: Progress) -> dict[str, Manifest]:
    """Build what is not fresh, one stage after the other; the manifests of all of them.

    In a launch of several processes every one calls this: the main one leads, the others help where a stage is shared,
    and get no manifests.

    Raises:
        HycoError: a stage failed; the finished ones stay, and so do the finished units of a resumable one.
        StorageError: a file could not be read or written; the same stays.
    """
    from hyco_export.nn.crew import current_crew

    crew = current_crew()
    if not crew.main:
        _follow(run, stages, crew)
        return {}
    if run.read_only and all(item.fresh for item in plan(run, stages)):
        crew.tell(None)
        progress.note(f"{run.root} cannot be written, and every stage in it is fresh")
        return {stage.name: read_manifest(run.folder(stage)) for stage in stages}
    with run.lock():
        planned = plan(run, stages)
        names = [item.folder.name for item in planned]
        sweep(run.root, names, [_build_dir(run, item) for item in planned if item.stage.resumable and not item.fresh])
        _prepare_data(run, planned, progress)
        _check_all(run, planned, progress)
        for position, item in enumerate(planned, 1):
            label = f"[{position}/{len(stages)}] {item.stage.name}"
            if item.fresh:
                progress.note(f"{label}: fresh")
                continue
            progress.note(f"{label}: {item.reason}")
            _build_one(run, item, crew, progress)
        crew.tell(None)
        sweep(run.root, names)
    return {stage.name: verify(run.folder(stage)) for stage in stages}


def _follow(run: RunFolder, stages: Sequence[Stage], crew: "Crew") -> None:
    """Build the shared stages that the main process announces, until it has none left."""
    by_name = {stage.name: stage for stage in stages}
    while (task := crew.tell()) is not None:
        name, inputs, build_dir = task
        use_threads(run.recipe.threads)
        by_name[name].build(by_name[name].config(run.recipe), inputs, build_dir, Silent())


def _prepare_data(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Write the conversations that no local path holds, and refuse prompts that cannot be used, before any stage."""
    stale = [item.stage.sources(run.recipe) for item in planned if not item.fresh]
    references = {name: source for sources in stale for name, source in sources.items()}
    data = {name: source for name, source in references.items() if not isinstance(source, Checkpoint)}
    for name, source in data.items():
        run.source(name, source, _reading(name, as_source(source).limit, progress))
    if "calibration" in data and "validation" in data:
        paths = {name: run.source(name, data[name]) for name in ("calibration", "validation")}
        require_prompts(paths["calibration"], paths["validation"], run.recipe.validation.prompts)


def _reading(name: str, limit: int | None, progress: Progress) -> OnCount:
    """Shows how many conversations of a data source are read."""
    return lambda done: progress.step(f"{name} read", done, limit or done)


def _check_all(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Ask what the checkpoints and every stage that will be built forbid, before the first one works for minutes."""
    stale = [item for item in planned if not item.fresh]
    if stale:
        require_family(run)
    require_full_precision(run, {item.stage.name for item in stale})
    note_unpinned(run, progress.note)
    for item in stale:
        item.stage.check(item.stage.config(run.recipe), _sources(run, item.stage))


def require_family(run: RunFolder) -> None:
    """The recipe's checkpoints must belong together; told by their configs alone.

    Raises:
        CheckpointError: they do not; all mismatches are named.
    """
    from hyco_export.nn.family import check_family
    from hyco_export.nn.verifier import load_config

    models = run.recipe.models
    named = (("verifier", models.verifier), ("head", models.head), ("slm", models.slm))
    configs = {name: load_config(run.source(name, checkpoint)) for name, checkpoint in named if checkpoint is not None}
    check_family(configs["verifier"], configs.get("head"), configs["slm"], bool(run.recipe.slm.bridge))


def _build_dir(run: RunFolder, item: PlannedStage) -> Path:
    return build_folder(run.root, item.folder.name, item.key, library_versions(LIBRARIES))


def _build_one(run: RunFolder, item: PlannedStage, crew: "Crew", progress: Progress) -> None:
    build_dir = _build_dir(run, item)
    build_dir.mkdir(parents=True, exist_ok=item.stage.resumable)
    config = item.stage.config(run.recipe)
    inputs = _inputs(run, item.stage)
    use_threads(run.recipe.threads)
    release_freed()  # of the stage before, whose heap would stay and count for this one
    began = time.monotonic()
    if item.stage.shared:
        crew.tell((item.stage.name, inputs, build_dir))
    with measured() as peak, said_of(build_dir):
        metrics = item.stage.build(config, inputs, build_dir, progress)
    manifest = Manifest(
        stage=item.stage.name,
        revision=item.stage.revision,
        key=item.key,
        config=config,
        inputs=item.input_keys,
        sources=item.source_digests,
        files={},
        metrics=metrics,
        versions=library_versions(LIBRARIES),
        wall_s=round(time.monotonic() - began, 3),
        peak_rss_bytes=peak.own_bytes,
        children_rss_bytes=peak.children_bytes,
        origins=origins(run, item.stage),
    )
    with said_of(build_dir):
        publish(build_dir, item.folder, manifest)


def use_threads(count: int | None) -> None:
    """Let torch compute with `count` threads from now on; None leaves the choice to torch."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _inputs(run: RunFolder, stage: Stage) -> Mapping[str, Path]:
    """One path per need (never a per-target stage: nothing is built from a binary) and per source."""
    needs = {need: run.root / need for need in stage.needs}
    return {**needs, **_sources(run, stage)}


def _sources(run: RunFolder, stage: Stage) -> dict[str, Path]:
    """One path per source."""
    return {name: run.source(name, reference) for name, reference in stage.sources(run.recipe).items()}


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the libraries that can change an artifact's bytes."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
