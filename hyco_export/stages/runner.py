"""The runner: reuses what is fresh of a plan, builds the rest in order, publishes each result at once.

One run folder holds one artifact per stage (`<stage>`, or `<stage>@<target>` where a target changes the bytes). Why a
stage is fresh or not is decided in `stages.plan`.
"""

import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.artifact import (
    MANIFEST_NAME,
    RECEIPT_SUFFIX,
    Manifest,
    content_digest,
    publish,
    read_manifest,
    verify,
)
from hyco_export.core.files import storage_errors
from hyco_export.core.memory import measured, release_freed
from hyco_export.errors import ArtifactError, interrupt_keeps
from hyco_export.stages.declarations import PREVIOUS, Progress, Silent, Stage, library_versions, use_threads
from hyco_export.stages.plan import PlannedStage, is_unchanged, plan
from hyco_export.stages.run_folder import RunFolder, origins

if TYPE_CHECKING:
    from hyco_export.models.process_group import ProcessGroup

BUILD_FOLDER = ".build"  # in the run folder: artifacts while they are built, `<artifact>-<identity>`
IDENTITY_DIGITS = 16


def build_folder(root: Path, artifact: str, key: str, versions: Mapping[str, str]) -> Path:
    """The build folder of an artifact with this key, made with these libraries."""
    identity = content_digest([key, versions])
    return root / BUILD_FOLDER / f"{artifact}-{identity[:IDENTITY_DIGITS]}"


def sweep(root: Path, artifacts: Iterable[str], keep: Collection[Path] = ()) -> None:
    """Remove what earlier runs left of these artifacts, but the build folders to keep."""
    builds = root / BUILD_FOLDER
    if not builds.is_dir():
        return
    names = set(artifacts)
    for path in builds.iterdir():
        artifact, _, _ = path.name.rpartition("-")
        if path not in keep and names & {artifact, path.name}:
            shutil.rmtree(path)
    if not any(builds.iterdir()):
        builds.rmdir()


def build_all(
    run: RunFolder, stages: Sequence[Stage], progress: Progress, rebuild: bool = False
) -> dict[str, Manifest]:
    """Build what is not fresh, one stage after the other; the manifests of all of them.

    In a launch of several processes every one calls this: the main one leads, the others help where a stage is shared,
    and get no manifests.

    Args:
        rebuild: what was built with other versions of libraries is built anew, too.

    Raises:
        HycoError: a stage failed; the finished ones stay, and so do the finished units of a resumable one.
        StorageError: a file could not be read or written; the same stays.
    """
    from hyco_export.models.process_group import current_group  # torch and transformers: not before there is work
    from hyco_export.stages.checks import check_all, prepare_data

    group = current_group()
    if not group.main:
        _follow(run, stages, group)
        return {}
    if run.read_only and all(item.fresh for item in plan(run, stages, rebuild)):
        group.broadcast(None)
        progress.note(f"{run.root} cannot be written, and every stage in it is fresh")
        return {stage.name: read_manifest(run.folder(stage)) for stage in stages}
    with run.lock():
        planned = plan(run, stages, rebuild)
        names = [item.folder.name for item in planned]
        sweep(run.root, names, [_build_dir(run, item) for item in planned if item.stage.resumable and not item.fresh])
        with interrupt_keeps(lambda: _kept(run, planned)):
            prepare_data(run, planned, progress)
            check_all(run, planned, progress)
            for position, item in enumerate(planned, 1):
                label = f"[{position}/{len(stages)}] {item.stage.name}"
                if item.fresh:
                    progress.note(f"{label}: fresh" + (f", {item.remark}" if item.remark else ""))
                    continue
                if item.waits and is_unchanged(run, item):
                    progress.note(f"{label}: fresh, what it is made from has the bytes that it had")
                    continue
                progress.note(f"{label}: {item.reason}")
                _build_one(run, item, group, progress, rebuild)
        group.broadcast(None)
        sweep(run.root, names)
    return {stage.name: verify(run.folder(stage)) for stage in stages}


def _follow(run: RunFolder, stages: Sequence[Stage], group: "ProcessGroup") -> None:
    """Build the shared stages that the main process announces, until it has none left."""
    by_name = {stage.name: stage for stage in stages}
    while (task := group.broadcast()) is not None:
        name, inputs, build_dir = task
        use_threads(run.recipe.threads)
        by_name[name].build(by_name[name].config(run.recipe), inputs, build_dir, Silent())


def _build_dir(run: RunFolder, item: PlannedStage) -> Path:
    return build_folder(run.root, item.folder.name, item.key, library_versions(item.stage.libraries))


def _build_one(run: RunFolder, item: PlannedStage, group: "ProcessGroup", progress: Progress, rebuild: bool) -> None:
    build_dir = _build_dir(run, item)
    build_dir.mkdir(parents=True, exist_ok=item.stage.resumable)
    config = item.stage.config(run.recipe)
    inputs = {**_inputs(run, item.stage), **({} if rebuild else _previous(item))}
    use_threads(run.recipe.threads)
    release_freed()  # of the stage before, whose heap would stay and count for this one
    began = time.monotonic()
    if item.stage.shared:
        group.broadcast((item.stage.name, inputs, build_dir))
    with measured() as peak, storage_errors(build_dir):
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
        versions=library_versions(item.stage.libraries),
        wall_s=round(time.monotonic() - began, 3),
        peak_rss_bytes=peak.own_bytes,
        children_rss_bytes=peak.children_bytes,
        total_rss_bytes=peak.total_bytes,
        origins=origins(run, item.stage),
        input_files={need: read_manifest(inputs[need]).files_digest for need in item.stage.needs},
    )
    with storage_errors(build_dir):
        publish(build_dir, item.folder, manifest)


def _kept(run: RunFolder, planned: Sequence[PlannedStage]) -> str:
    """What there is of a stopped run's plan, in words: artifacts, fresh ones too, and units of a resumable stage."""
    kept = [item.stage.name for item in planned if item.fresh or _is_built(item)]
    kept += [f"what is done of {item.stage.name}" for item in planned if not item.fresh and any(_receipts(run, item))]
    return f"{', '.join(kept)} in {run.root}" if kept else ""


def _is_built(item: PlannedStage) -> bool:
    return (item.folder / MANIFEST_NAME).is_file() and read_manifest(item.folder).key == item.key


def _receipts(run: RunFolder, item: PlannedStage) -> Iterator[Path]:
    return _build_dir(run, item).rglob(f"*{RECEIPT_SUFFIX}")


def _inputs(run: RunFolder, stage: Stage) -> Mapping[str, Path]:
    """One path per need (never a per-target stage: nothing is built from a binary) and per source."""
    needs = {need: run.root / need for need in stage.needs}
    return {**needs, **run.sources(stage)}


def _previous(item: PlannedStage) -> Mapping[str, Path]:
    """The artifact that this one replaces, where its stage may take over files of it and its code is the same."""
    if not item.stage.reuses or not (item.folder / MANIFEST_NAME).is_file():
        return {}
    try:
        same = read_manifest(item.folder).revision == item.stage.revision
    except ArtifactError:
        return {}
    return {PREVIOUS: item.folder} if same else {}
