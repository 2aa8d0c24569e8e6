"""What a stage is: a name, what it reads, and a function that turns inputs into one artifact folder.

The stages themselves stand in `stages.table`.
"""

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.recipe_sections import Reference

if TYPE_CHECKING:
    from hyco_export.core.estimates.shapes import FamilyShape
    from hyco_export.core.estimates.stages import Estimate, Work


class Progress(Protocol):
    """How a stage tells what it is doing; the CLI shows it, tests ignore it."""

    def step(self, label: str, done: int, total: int) -> None:
        """`done` of `total` units of `label` are finished."""
        ...

    def note(self, text: str) -> None:
        """One line worth reading."""
        ...


class Silent:
    """A Progress that shows nothing."""

    def step(self, label: str, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


Metrics = dict[str, Any]
Build = Callable[[Any, Mapping[str, Path], Path, Progress], Metrics]
Source = Checkpoint | Reference  # a model, or conversations
Check = Callable[[Any, Mapping[str, Path]], None]
Estimator = Callable[[Recipe, "FamilyShape", "Work"], "Estimate | None"]


def no_check(config: Any, sources: Mapping[str, Path]) -> None:
    """Nothing can be said about this stage before it is built."""


def no_estimate(recipe: Recipe, family: "FamilyShape", work: "Work") -> None:
    """What this stage takes is not known."""


PREVIOUS = "previous"  # among the inputs of a stage that reuses
PYTHON = "python"
LIBRARIES = (  # those that can change the bytes of some artifact
    PYTHON,
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",  # chat templates
    "datasets",
    "pyarrow",
    "aimet-torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-qnn",
    "safetensors",
    "matplotlib",
    "numpy",
)


@dataclass(frozen=True)
class Stage:
    """One row of the stage table.

    `config(recipe)` is a frozen struct with just the fields that change the artifact's bytes; `sources(recipe)` names
    the checkpoints and data files it reads (key -> the recipe's Checkpoint, or its reference to a data file); `needs`
    are earlier stages. `build(config, inputs, out_dir, progress)` gets one path per need and per source in `inputs`,
    writes its files into `out_dir` (existing and empty) and returns JSON-able metrics. Raise `revision` when the code
    changes the bytes.

    A `resumable` stage may find in `out_dir` what a killed build of the same key left there: it verifies that
    (`core.artifact`) and goes on, to the same bytes. A `shared` stage is built by every process of a launch together
    (`models.process_group`), the others by the main one. `check(config, inputs)` gets its sources and raises for
    what only they can tell; it reads a checkpoint once at most, and is asked before any stage of a chain is built. A
    plan asks it too; then conversations that are not written yet are missing from `inputs`. `estimate` says what a
    build takes, `summary` what the command of this name does. `libraries` names those that can change the bytes: their
    versions stand in the manifest, and a plan says where they are others now.

    A stage that `reuses` finds the artifact that lies in its place, of the same revision, at `inputs[PREVIOUS]`: it
    may take over files of it that it would make again byte by byte.
    """

    name: str
    revision: int
    needs: tuple[str, ...]
    config: Callable[[Recipe], msgspec.Struct]
    sources: Callable[[Recipe], Mapping[str, Source]]
    build: Build
    per_target: bool = False  # one artifact folder per target
    check: Check = no_check
    estimate: Estimator = no_estimate
    summary: str = ""
    resumable: bool = False
    shared: bool = False
    reuses: bool = False
    libraries: tuple[str, ...] = LIBRARIES


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Installed versions of the libraries that can change an artifact's bytes, and Python's own."""
    found = {}
    for name in names:
        try:
            found[name] = platform.python_version() if name == PYTHON else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def version_changes(built_with: Mapping[str, str], used: Collection[str]) -> str:
    """What an artifact's manifest says it was built with, beside what is installed now; "" where nothing changed.

    Libraries that the manifest does not name are passed over, for nothing is known of them, as are those of
    `LIBRARIES` that are not `used`. Where it names none, that is said.
    """
    if not built_with:
        return "its manifest names no library that it was built with"
    now = library_versions(list(built_with))
    counted = [name for name in built_with if name in used or name not in LIBRARIES]
    changed = [name for name in counted if now.get(name) != built_with[name]]
    if not changed:
        return ""
    before = ", ".join(f"{name} {built_with[name]}" for name in changed)
    return f"built with {before}, now {', '.join(now.get(name, 'not installed') for name in changed)}"


def use_threads(count: int | None) -> None:
    """Let torch compute with `count` threads from now on; another number sums in another order. None: its choice."""
    if count is not None:
        import torch

        torch.set_num_threads(count)
