"""Builds a bundle's folder from a run's artifacts: whole or not at all, and again from where a killed build was.

Everything is written into a folder beside the wanted one; `bundle.json` comes last, with the hash of every file, and
then the folder is renamed. A folder that is no bundle is never replaced.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

import hyco_export
from hyco_export.bundle.archive import write_driver
from hyco_export.bundle.contents import TOKENIZER_FILES, describe
from hyco_export.bundle.document import LISTS, write_document
from hyco_export.bundle.goldens import emulate, record_goldens, with_tolerances
from hyco_export.bundle.raw_files import input_list
from hyco_export.bundle.spec import (
    BUNDLE_FILE,
    Bundle,
    open_bundle,
    read_bundle,
)
from hyco_export.core.artifact import (
    DEBRIS,
    WORK_FOLDER,
    FileRecord,
    content_digest,
    file_digest,
)
from hyco_export.core.device_spec import GraphSession
from hyco_export.core.files import folder_lock, storage_errors, write_json
from hyco_export.core.targets import find_target
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import Subject

PACKAGE = Path(__file__).parent
CONSUMER = "consumer.py"
REVISION = 1  # of what is written here: another one makes another bundle
OnStep = Callable[[str, int, int], None]  # label, done, total


def build_bundle(subject: Subject, out: Path, on_step: OnStep) -> Bundle:
    """The bundle of a run in `out`; one that was made from the same artifacts is kept as it is.

    Raises:
        ArtifactError: `out` holds what is no bundle's, or somebody else builds there.
        StorageError: it cannot be written.
        CompileError: a renamed binary is not what it was.
    """
    key = bundle_key(subject)
    _require_ours(out)
    kept = _whole_bundle(out, key)
    if kept is not None:
        return kept
    _require_no_strays(out)
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        building = out.with_name(f".{out.name}.building")
        with folder_lock(building, "the folder of the build", "building a bundle", "--out"):
            work = building / key
            for stale in building.iterdir():
                if stale.is_dir() and stale != work:
                    shutil.rmtree(stale)
            bundle = _write(subject, key, work, on_step)
            _publish(work, out)
            shutil.rmtree(building, ignore_errors=True)
    return bundle


def bundle_key(subject: Subject) -> str:
    """Digest of the artifacts, the recipe's drafting, and what writes bundles."""
    artifacts, recipe = subject.artifacts, subject.recipe
    tokenizer = {
        name: file_digest(path) for name in TOKENIZER_FILES if (path := subject.checkpoints.verifier / name).is_file()
    }
    asked = msgspec.to_builtins([recipe.drafting, recipe.sampling, recipe.validation.epsilon, recipe.compile])
    code = {path.name: file_digest(path) for path in sorted(PACKAGE.glob("*.*")) if path.is_file()}
    made_of = [REVISION, hyco_export.__version__, recipe.target, artifacts.head_key, artifacts.compiled_key]
    return content_digest([*made_of, artifacts.keepset.digest, tokenizer, asked, code])


def _whole_bundle(out: Path, key: str) -> Bundle | None:
    """The bundle that lies there, if it is the wanted one and nothing of it is damaged."""
    if not (out / BUNDLE_FILE).is_file() or read_bundle(out).key != key:
        return None
    with suppress(ArtifactError):
        return open_bundle(out)
    return None


def _require_ours(out: Path) -> None:
    """Raises ArtifactError: `out` holds what no bundle command wrote."""
    if out.is_dir() and any(out.iterdir()) and not (out / BUNDLE_FILE).is_file():
        raise ArtifactError(f"{out} is a folder with other contents (no {BUNDLE_FILE})", "give --out a new folder")
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file", "give --out a new folder")
    if (out / BUNDLE_FILE).is_file():
        read_bundle(out)


def _require_no_strays(out: Path) -> None:
    """Raises ArtifactError: somebody put a file into the bundle that is about to be replaced."""
    if not out.exists() or not any(out.iterdir()):
        return
    present = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    strays = sorted(present - {BUNDLE_FILE, *read_bundle(out).files})
    if strays := [name for name in strays if not any(fnmatchcase(Path(name).name, debris) for debris in DEBRIS)]:
        raise ArtifactError(
            f"{out / strays[0]} is no file of the bundle that a new one would replace",
            "move it elsewhere, or give --out a new folder",
        )


def _write(subject: Subject, key: str, work: Path, on_step: OnStep) -> Bundle:
    work.mkdir(parents=True, exist_ok=True)
    bundle, settings = describe(subject, key, work)
    integer = {name: _integer_graph(work / graph.integer_graph) for name, graph in bundle.graphs.items()}
    goldens = record_goldens(
        subject.root,
        work,
        bundle,
        settings,
        integer.__getitem__,
        lambda done, total: on_step("golden sessions on the integer graphs", done, total),
    )
    integer.clear()  # their memory is the emulator's now
    cases = emulate(
        work,
        goldens.cases,
        {name: bundle.graph_spec(name) for name in bundle.graphs},
        lambda name: _emulated(work / bundle.graphs[name].model, subject.recipe.target),
        lambda done, total: on_step("golden vectors in the emulator", done, total),
    )
    bundle = msgspec.structs.replace(
        bundle, cases=tuple(cases), host_cases=tuple(goldens.host_cases), sessions=tuple(goldens.sessions)
    )
    bundle = with_tolerances(work, bundle)
    (work / LISTS).mkdir(exist_ok=True)
    for name in bundle.graphs:  # a line a golden vector
        order = [tensor.name for tensor in bundle.graphs[name].inputs]
        cases = [case for case in bundle.cases if case.graph == name]
        text = input_list({tensor: case.inputs[tensor] for tensor in order} for case in cases)
        (work / LISTS / f"{name}.txt").write_text(text, encoding="utf-8")
    write_document(work, bundle)
    shutil.copyfile(PACKAGE / CONSUMER, work / CONSUMER)
    write_driver(work / "driver.pyz")
    shutil.rmtree(work / WORK_FOLDER, ignore_errors=True)
    files = {
        path.relative_to(work).as_posix(): FileRecord(file_digest(path), path.stat().st_size)
        for path in sorted(work.rglob("*"))
        if path.is_file() and path.name != BUNDLE_FILE
    }
    bundle = msgspec.structs.replace(bundle, files=files)
    write_json(work / BUNDLE_FILE, bundle)
    return bundle


def _integer_graph(path: Path) -> GraphSession:
    from hyco_export.graph.parity import ReferenceSession

    return ReferenceSession(path)


def _emulated(model: Path, target: str) -> GraphSession:
    from hyco_export.graph.qnn import open_context

    return open_context(model, find_target(target))


def _publish(work: Path, out: Path) -> None:
    """Rename the finished folder; an older bundle is there until the new one is whole."""
    for path in (work / BUNDLE_FILE, work):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if out.is_dir():
        retired = work.with_name(f"{work.name}.retired")
        out.rename(retired)
    work.rename(out)
