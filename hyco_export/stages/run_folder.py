"""A run's folder: where its artifacts, data and lock lie, and what its recipe's references mean on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyco_export.core.artifact import artifact_name
from hyco_export.core.data.conversations import Conversation
from hyco_export.core.data.sources import OnCount, at_hand, path_at_hand, prepared, source_digest
from hyco_export.core.deferred import Deferred
from hyco_export.core.files import folder_lock
from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.recipe_sections import Reference
from hyco_export.errors import RecipeError, StorageError
from hyco_export.stages.declarations import Source, Stage

# of huggingface_hub's weight, and not asked before a command's options are checked
checkpoint_digest = Deferred("hyco_export.models.checkpoints:checkpoint_digest")
checkpoint_folder = Deferred("hyco_export.models.checkpoints:checkpoint_folder")
checkpoint_origin = Deferred("hyco_export.models.checkpoints:checkpoint_origin")

DATA_FOLDER = ".data"  # conversations of Hub sets, mixes and selections, as the stages read them


class RunFolder:
    """Where the artifacts of one recipe live.

    Args:
        root: the run folder; made when a stage is built.
        recipe: the recipe of the run.
        recipe_folder: where the recipe's relative paths start; None for the embedded recipe.
    """

    def __init__(self, root: Path, recipe: Recipe, recipe_folder: Path | None) -> None:
        self.root = root
        self.recipe = recipe
        self.recipe_folder = recipe_folder
        self._locked = False

    def folder(self, stage: Stage) -> Path:
        """The artifact folder of a stage."""
        return self.root / artifact_name(stage.name, self.recipe.target if stage.per_target else None)

    def source(self, name: str, source: Source, on_count: OnCount = lambda done: None) -> Path:
        """The local path of conversations, or of a checkpoint's folder; what is not here is fetched from the Hub.

        Raises:
            CheckpointError, RecipeError: it is nowhere, and cannot be fetched.
        """
        if isinstance(source, Checkpoint):
            folder: Path = checkpoint_folder(source, self.recipe_folder)
            return folder
        with _field_named(name):
            return prepared(name, source, self.recipe_folder, self.root / DATA_FOLDER, on_count)

    def sources(self, stage: Stage) -> dict[str, Path]:
        """One path per source of a stage. Raises as `source`."""
        return {name: self.source(name, reference) for name, reference in stage.sources(self.recipe).items()}

    def sources_at_hand(self, stage: Stage) -> dict[str, Path]:
        """The same without fetching or writing conversations: those that are not there yet are left out.

        Raises:
            CheckpointError: a checkpoint is nowhere, and cannot be fetched.
        """
        found: dict[str, Path] = {}
        for name, reference in stage.sources(self.recipe).items():
            if isinstance(reference, Checkpoint):
                found[name] = self.source(name, reference)
                continue
            with suppress(RecipeError):  # the plan names data that are missing
                path = path_at_hand(name, reference, self.recipe_folder, self.root / DATA_FOLDER)
                found |= {} if path is None else {name: path}
        return found

    def at_hand(self, name: str, source: Reference) -> Iterator[Conversation] | None:
        """Conversations that can be read without writing or fetching any (`core.data.sources.at_hand`), else None.

        Raises:
            RecipeError: a local path that does not exist.
        """
        with _field_named(name):
            return at_hand(name, source, self.recipe_folder, self.root / DATA_FOLDER)

    def digest(self, name: str, source: Source) -> str:
        """What a source adds to a key (`core.data.sources.source_digest`; for a checkpoint its files).

        Raises:
            CheckpointError, RecipeError: it is missing.
        """
        if isinstance(source, Checkpoint):
            digest: str = checkpoint_digest(self.source(name, source))
            return digest
        with _field_named(name):
            return source_digest(source, self.recipe_folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process builds or validates in a run folder; who holds it already goes on holding it.

        Raises:
            ArtifactError: another process does.
            StorageError: the folder cannot be made or written.
        """
        if self._locked:
            yield
            return
        with folder_lock(self.root, "run folder", "building or validating", "--run"):
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def require_possible(self) -> None:
        """Refuse, without making anything, where no folder can be.

        Raises:
            StorageError: a part of the path is a file.
        """
        nearest = next(path for path in (self.root, *self.root.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise StorageError(
                f"run folder {self.root} cannot be made or written: {nearest} is not a folder",
                "give another folder with --run",
            )

    @property
    def read_only(self) -> bool:
        """Is it there, and may this process not write into it?"""
        return self.root.is_dir() and not os.access(self.root, os.W_OK)


@contextmanager
def _field_named(name: str) -> Iterator[None]:
    """Say which of the recipe's data fields a refusal is about."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"$.data.{name}: {error.message}", error.hint) from error


def origins(run: RunFolder, stage: Stage) -> dict[str, str]:
    """Where each checkpoint of a stage came from: Hub id and commit, or the recipe's reference."""
    references = stage.sources(run.recipe).items()
    named = {name: reference for name, reference in references if isinstance(reference, Checkpoint)}
    return {name: checkpoint_origin(reference, run.source(name, reference)) for name, reference in named.items()}
