"""What this machine, a run folder and a server can do, and what stands in the way: one check each, with what it blocks.

No check writes anything but the one that asks whether the run folder can be written. Tokens are never shown.
"""

import locale
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from packaging.requirements import Requirement

from hyco_export.cloud.client import aihub_login
from hyco_export.core.artifact import MANIFEST_NAME, verify
from hyco_export.core.files import resource_path
from hyco_export.core.targets import find_target
from hyco_export.device.interfaces import Transport
from hyco_export.errors import HycoError, first_line
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of

DISTRIBUTION = "hyco-export"
CONSTRAINTS = "constraints.txt"
OLDEST_PYTHON = (3, 11)
LARGE_COMPILE_BYTES = 7_000_000_000  # resident, for an SLM of E2B's shape; docs/results.md
LARGE_RUN_BYTES = 10_000_000_000  # artifacts of the paper's configuration with its captures
NARROW_TERMINAL = 80  # columns
State = Literal["fine", "note", "blocked"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. `blocks`: what cannot be done, or suffers; `next`: what helps."""

    group: str
    name: str
    state: State
    found: str
    blocks: str = ""
    next: str = ""


Checks = Iterator[Check]


def examine_machine(place: Path) -> list[Check]:
    """Python, libraries, compiler, GPU, memory, disk at `place`, NPU libraries, logins, terminal."""
    parts: Sequence[Callable[[], Checks]] = (
        _python,
        _libraries,
        _c_compiler,
        _gpu,
        _memory,
        lambda: _disk(place),
        _npu_libraries,
        _hub_login,
        _aihub_login,
        _terminal,
    )
    return [check for part in parts for check in part()]


def _machine(name: str, state: State, found: str, blocks: str = "", next_step: str = "") -> Check:
    return Check("machine", name, state, found, "" if state == "fine" else blocks, "" if state == "fine" else next_step)


def _python() -> Checks:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] >= OLDEST_PYTHON
    yield _machine("Python", "fine" if good else "blocked", found, "everything", "install Python 3.11 or newer")


def _libraries() -> Checks:
    """Against what the package requires, then against the versions that it is tested with."""
    missing, old, other = compare_libraries(_required(), _pinned())
    if missing or old:
        wrong = ", ".join([*(f"{name} is missing" for name in missing), *old])
        yield _machine("libraries", "blocked", wrong, "everything that imports them", "pip install -U hyco-export")
    elif other:
        shown = ", ".join(other[:5]) + (f" and {len(other) - 5} more" if len(other) > 5 else "")
        yield _machine("libraries", "note", shown, "the promise of equal bytes", f"pip install -c {CONSTRAINTS} ...")
    else:
        yield _machine("libraries", "fine", "as tested")


def _required() -> list[Requirement]:
    """Of this package without its extras; none where it runs from a folder that was not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})]


def _pinned() -> dict[str, str]:
    """Versions by name that this project is tested with."""
    lines = resource_path(CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    pins = (line.partition("#")[0].strip().partition("==") for line in lines)
    return {name: version for name, mark, version in pins if mark}


def compare_libraries(
    required: Sequence[Requirement], pinned: dict[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """Names that are missing; what is too old; what is of another version than tested (of required libraries)."""
    missing, old, other = [], [], []
    by_name = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for requirement in required:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        tested = by_name.get(requirement.name.lower().replace("_", "-"))
        if not requirement.specifier.contains(version, prereleases=True):
            old.append(f"{requirement.name} {version}, needed {requirement.specifier}")
        elif tested is not None and version.partition("+")[0] != tested:
            other.append(f"{requirement.name} {version}, tested {tested}")
    return missing, old, other


def _c_compiler() -> Checks:
    from hyco_export.graph.smaller_binaries import find_compiler

    found = find_compiler()
    yield _machine(
        "C compiler",
        "fine" if found else "note",
        str(found or "none"),
        "$.compile.two_bit_weights: 2-bit weights then take 4 bits in the binary",
        "apt-get install gcc, or set CC",
    )


def _gpu() -> Checks:
    try:
        import torch
    except ImportError:
        yield _machine("GPU", "note", "torch is missing", "serve --device cuda", "install torch")
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found = ", ".join(names) or "none that torch sees"
    yield _machine("GPU", "fine" if names else "note", found, "serve --device cuda", "none is needed: --device cpu")


def _memory() -> Checks:
    memory = psutil.virtual_memory()
    good = memory.available >= LARGE_COMPILE_BYTES
    found = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free, {os.cpu_count()} cores"
    blocks = f"compiling an SLM of E2B's size ({LARGE_COMPILE_BYTES / 1e9:.0f} GB)"
    yield _machine("memory", "fine" if good else "note", found, blocks, "close programs, or take a larger machine")


def _disk(place: Path) -> Checks:
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    good = free >= LARGE_RUN_BYTES
    blocks = f"a run of the paper's configuration ({LARGE_RUN_BYTES / 1e9:.0f} GB)"
    found = f"{free / 1e9:.1f} GB free at {there}"
    yield _machine("disk", "fine" if good else "note", found, blocks, "make room, or give another folder with --run")


def _npu_libraries() -> Checks:
    from hyco_export.graph.qnn import system_library, vendor_libraries

    blocks, hint = "compile, and the device back end qnn", "pip install onnxruntime-qnn"
    try:
        _, qairt = vendor_libraries()
        version = metadata.version("onnxruntime-qnn")
    except (ImportError, metadata.PackageNotFoundError) as error:
        yield _machine("NPU libraries", "blocked", first_line(error), blocks, hint)
        return
    found = f"onnxruntime-qnn {version}, QAIRT {qairt}"
    if not system_library().is_file():
        yield _machine("NPU libraries", "blocked", f"{found}, without {system_library().name}", blocks, hint)
        return
    yield _machine("NPU libraries", "fine", found)


def _hub_login() -> Checks:
    from huggingface_hub import constants, get_token

    offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    state: State = "fine" if get_token() and not offline else "note"
    found = ("logged in" if get_token() else "not logged in") + offline
    hint = "unset HF_HUB_OFFLINE" if offline else "hf auth login"
    yield _machine("Hub", state, found, "checkpoints that are gated, or not on this machine", hint)


def _aihub_login() -> Checks:
    login = aihub_login()
    state: State = "fine" if login.configured else "note"
    yield _machine("AI Hub", state, login.found, "profile and compile --via aihub", login.next)


def _terminal() -> Checks:
    columns, encoding = shutil.get_terminal_size().columns, locale.getpreferredencoding(False)
    kind = "a terminal" if sys.stdout.isatty() else "no terminal (plain lines, no bars)"
    good = columns >= NARROW_TERMINAL and encoding.upper().replace("-", "") == "UTF8"
    found = f"{kind}, {columns} columns, {encoding}"
    yield _machine("terminal", "fine" if good else "note", found, "tables that fit", "widen it, and set LANG=C.UTF-8")


def examine_run(run: RunFolder) -> list[Check]:
    """Each stage's artifact: whole, damaged or not built; and whether the folder can be written.

    Whether an artifact is still what the recipe asks for is what `run --dry-run` tells.
    """
    checks = [_writable(run.root)]
    find_target(run.recipe.target)
    for stage in stages_of(run.recipe):
        folder = run.folder(stage)
        command = f"hyco-export {stage.name}"
        if not (folder / MANIFEST_NAME).is_file():
            checks.append(Check("run folder", folder.name, "note", "not built", "what follows it", command))
            continue
        try:
            manifest = verify(folder)
        except HycoError as error:
            checks.append(Check("run folder", folder.name, "blocked", error.message, "what reads it", error.hint))
        else:
            checks.append(Check("run folder", folder.name, "fine", f"whole, {manifest.size_bytes / 1e6:.1f} MB"))
    return checks


def _writable(root: Path) -> Check:
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    good = there.is_dir() and os.access(there, os.W_OK)
    found = f"{root} can{'' if good else 'not'} be written"
    blocks, hint = ("", "") if good else ("every build", "give another folder with --run")
    return Check("run folder", "place", "fine" if good else "blocked", found, blocks, hint)


def examine_server(url: str, connect: Callable[[], Transport]) -> list[Check]:
    """Does a server answer, and what does it serve."""
    try:
        info = connect().info()
    except HycoError as error:
        return [Check("server", url, "blocked", error.message, "validate, bench and chat", error.hint)]
    handoffs = "hands off to the head" if info.head_digest else "no hand-offs: devices draft with the SLM alone"
    found = f"{info.server}, protocol {info.version}, trees of {info.node_limit} nodes, {handoffs}"
    return [Check("server", url, "fine", found)]
