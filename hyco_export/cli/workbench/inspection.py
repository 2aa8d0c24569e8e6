"""What `inspect` does: an artifact folder checked file by file, the facts of any file, or how two of them differ."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hyco_export.bundle.spec import BUNDLE_FILE
from hyco_export.cli.console import format_bytes, format_value, output, problems, show_metrics
from hyco_export.cli.invocation import PROGRAM, imply
from hyco_export.core.artifact import MANIFEST_NAME, read_manifest, verify, verify_file
from hyco_export.errors import ArtifactError, HycoError, counted

if TYPE_CHECKING:
    from hyco_export.workbench.difference import Change, Difference, FileDifference
    from hyco_export.workbench.facts import FileFacts

ROLES = {"stored": "tensor"}  # how a role is called in a heading
SHOWN_ROWS = 40  # of a list in the terminal; --json has all of them


def inspect_path(path: Path, other: Path | None = None, as_json: bool = False) -> int:
    """Print a manifest (files checked), the facts of a file, or the difference of two; 1 where two differ, else 0.

    Raises:
        HycoError: nothing is there, it is of no known kind, or it is not what its manifest names.
    """
    if other is not None:
        return _inspect_two(path, other, as_json)
    if not path.exists():
        raise HycoError(f"{path} does not exist", "give an artifact folder, or a context binary (.bin) in one")
    if path.is_dir():
        _inspect_folder(path, as_json)
    elif path.suffix == ".bin":
        _inspect_binary(path)
    else:
        from hyco_export.workbench.files import read_file

        facts = read_file(path)
        if as_json:
            output.print_json(msgspec.json.encode(_plain(facts)).decode())
        else:
            _show_file(facts)
    return 0


def _inspect_folder(folder: Path, as_json: bool) -> None:
    if (folder / BUNDLE_FILE).is_file() and not (folder / MANIFEST_NAME).is_file():
        _inspect_bundle(folder, as_json)
        return
    _require_artifact(folder)
    with _built_from(folder):
        manifest = verify(folder)
    if as_json:
        output.print_json(msgspec.json.encode(manifest).decode())
        return
    show_metrics(f"{manifest.stage} (every file has its recorded sha256)", msgspec.to_builtins(manifest.metrics))
    files = {name: f"{record.size_bytes:,} B  {record.sha256}" for name, record in manifest.files.items()}
    show_metrics("\nfiles", files)
    show_metrics("\nmade with", {"key": manifest.key, **manifest.versions})


def _inspect_bundle(folder: Path, as_json: bool) -> None:
    """A bundle: what its JSON says at the top, and its files with their sizes."""
    from hyco_export.workbench.files import read_file

    content = read_file(folder / BUNDLE_FILE).facts
    files = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    if as_json:
        output.print_json(msgspec.json.encode({"bundle": content, "files": files}).decode())
        return
    show_metrics(f"bundle {folder}", _first({name: value for name, value in content.items() if "." not in name}))
    show_metrics("\nfiles", {name: format_bytes(size) for name, size in files.items()})


def _inspect_binary(path: Path) -> None:
    with _built_from(path.parent):
        _require_built(path)
    from hyco_export.graph.context_binary import read_context
    from hyco_export.graph.context_check import require_sound

    info = read_context(path)
    output.print_json(msgspec.json.encode(info).decode())
    require_sound(info, path.name)


def _plain(facts: "FileFacts") -> dict[str, Any]:
    return {"file": str(facts.path), "kind": facts.kind, "facts": facts.facts, "tensors": facts.tensors}


def _show_file(facts: "FileFacts") -> None:
    from hyco_export.workbench.difference import described

    size = format_bytes(facts.path.stat().st_size)
    output.print(f"{facts.path.name}: {facts.kind}, {size}", soft_wrap=True)
    if facts.facts:
        show_metrics("", _first(facts.facts))
    for role in dict.fromkeys(tensor.role for tensor in facts.tensors):
        some = [tensor for tensor in facts.tensors if tensor.role == role]
        total = format_bytes(sum(tensor.size_bytes for tensor in some))
        rows = {tensor.name: described(tensor) for tensor in some}
        show_metrics(f"\n{counted(len(some), ROLES.get(role, role))}, {total}", _first(rows))


def _first(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The first rows, and how many more there are."""
    shown = dict(list(rows.items())[:SHOWN_ROWS])
    return shown | ({"...": f"{len(rows) - SHOWN_ROWS} more: --json"} if len(rows) > SHOWN_ROWS else {})


def _inspect_two(left: Path, right: Path, as_json: bool) -> int:
    from hyco_export.workbench.difference import compare_paths

    found = compare_paths(left, right)
    if as_json:
        output.print_json(msgspec.json.encode(found).decode())
    else:
        _show_difference(found)
    return 0 if found.equal else 1


def _show_difference(found: "Difference") -> None:
    for side, names in ((found.left, found.only_left), (found.right, found.only_right)):
        for name in names[:SHOWN_ROWS]:
            output.print(f"only in {side}: {name}", soft_wrap=True)
    for file in found.files:
        _show_file_difference(file)
    same = counted(found.equal_files, "file")
    output.print(f"\n{same} {'says' if found.equal_files == 1 else 'say'} the same on both sides", soft_wrap=True)


def _show_file_difference(file: "FileDifference") -> None:
    output.print(f"\n{file.name} ({file.kind}){f': {file.note}' if file.note else ''}", soft_wrap=True)
    _show_changes(file.facts, "facts")
    _show_changes(file.tensors, "tensors")
    if file.layers:
        rows = {
            layer.layer: f"{layer.changed} of {layer.tensors} tensors; worst {layer.worst}: "
            f"{layer.differing_share:.2%} of its values differ"
            + ("" if layer.worst_db is None else f", {layer.worst_db:.1f} dB")
            for layer in file.layers
        }
        show_metrics("  weights by layer", _first(rows))


def _show_changes(changes: Sequence["Change"], what: str) -> None:
    if changes:
        rows = {change.name: f"{_side(change.left)} -> {_side(change.right)}" for change in changes}
        show_metrics(f"  {what}", _first(rows))


def _side(value: Any) -> str:
    return "nothing" if value is None else format_value(value)


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
