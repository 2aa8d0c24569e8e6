"""What `inspect` does: an artifact folder checked file by file, or the facts of a context binary."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hyco_export.cli.console import output, problems, show_metrics
from hyco_export.cli.invocation import PROGRAM, imply
from hyco_export.core.artifact import MANIFEST_NAME, read_manifest, verify, verify_file
from hyco_export.errors import ArtifactError, HycoError, counted


def inspect_path(path: Path) -> None:
    """Print a manifest (files checked) or the facts of a context binary.

    Raises:
        HycoError: neither is there, or it is not what its manifest names.
    """
    if not path.exists():
        raise HycoError(f"{path} does not exist", "give an artifact folder, or a context binary (.bin) in one")
    if path.is_dir():
        _require_artifact(path)
        with _built_from(path):
            manifest = verify(path)
        show_metrics(f"{manifest.stage} (every file has its recorded sha256)", msgspec.to_builtins(manifest.metrics))
        show_metrics(
            "\nfiles", {name: f"{record.size_bytes:,} B  {record.sha256}" for name, record in manifest.files.items()}
        )
        show_metrics("\nmade with", {"key": manifest.key, **manifest.versions})
    elif path.suffix == ".bin":
        with _built_from(path.parent):
            _require_built(path)
        from hyco_export.graph.context_binary import read_context
        from hyco_export.graph.context_check import require_sound

        info = read_context(path)
        output.print_json(msgspec.json.encode(info).decode())
        require_sound(info, path.name)
    else:
        raise HycoError(f"{path} is neither an artifact folder nor a context binary (.bin)", "give one of these")


@contextmanager
def _built_from(artifact: Path) -> Iterator[None]:
    """Building an artifact again needs its run folder, which is here, and its recipe, which is not."""
    imply(run=artifact.parent)
    try:
        yield
    except ArtifactError as error:
        if PROGRAM not in error.hint:
            raise
        hint = f"{error.hint}, with --recipe unless it is the embedded family's"
        raise ArtifactError(error.message, hint) from error


def _require_built(file: Path) -> None:
    """Raises ArtifactError: the manifest beside the file, where there is one, names another content."""
    if (file.parent / MANIFEST_NAME).is_file():
        verify_file(file.parent, file.name, read_manifest(file.parent))
    else:
        problems.print(f"no {MANIFEST_NAME} beside {file.name}: nothing to compare its bytes with")


def _require_artifact(folder: Path) -> None:
    """Tell a run folder and a foreign folder from an artifact.

    Raises:
        ArtifactError: the folder is one of these; the hint names what can be inspected.
    """
    if (folder / MANIFEST_NAME).is_file():
        return
    artifacts = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if artifacts:
        names = ", ".join(path.name for path in artifacts)
        raise ArtifactError(
            f"{folder} is a run folder with {counted(len(artifacts), 'artifact')}: {names}",
            f"inspect one of them: hyco-export inspect {shlex.quote(str(artifacts[0]))}",
        )
    raise ArtifactError(
        f"{folder} is no artifact (no {MANIFEST_NAME})", "give a folder that a stage built, such as runs/tiny/capture"
    )
