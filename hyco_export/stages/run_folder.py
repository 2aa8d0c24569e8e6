"""A run's folder: where its artifacts, data and lock lie, what its recipe's references mean on this machine, and
what the checkpoints behind them must fulfil."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from hyco_export.core.artifact import CAPTURE, artifact_name
from hyco_export.core.data.conversations import Conversation
from hyco_export.core.data.sources import OnCount, at_hand, path_at_hand, prepared, source_digest
from hyco_export.core.files import folder_lock
from hyco_export.core.memory import release_freed
from hyco_export.core.recipe import Checkpoint, Recipe
from hyco_export.core.recipe_sections import Reference
from hyco_export.errors import RecipeError, StorageError
from hyco_export.stages.declarations import Source, Stage

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
            from hyco_export.models.checkpoints import checkpoint_folder

            return checkpoint_folder(source, self.recipe_folder)
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
            from hyco_export.models.checkpoints import checkpoint_digest

            return checkpoint_digest(self.source(name, source))
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


def require_family(run: "RunFolder") -> None:
    """The recipe's checkpoints must belong together; told by their configs, and by the ids of their tokens.

    Raises:
        CheckpointError: they do not; all mismatches are named.
    """
    from hyco_export.models.families.checks import check_family, check_vocabularies
    from hyco_export.models.verifier import load_config

    models, bridged = run.recipe.models, bool(run.recipe.slm.bridge)
    named = (("verifier", models.verifier), ("head", models.head), ("slm", models.slm))
    folders = {name: run.source(name, checkpoint) for name, checkpoint in named if checkpoint is not None}
    configs = {name: load_config(folder) for name, folder in folders.items()}
    check_family(configs["verifier"], configs.get("head"), configs["slm"], bridged)
    if not bridged:
        check_vocabularies(folders["verifier"], folders["slm"], configs["verifier"].get_text_config().vocab_size)
        release_freed()


def require_generation(run: "RunFolder", note: Callable[[str], None]) -> None:
    """The verifier's texts must be those that transformers generates; says which of its defaults are not used.

    Raises:
        CheckpointError: its generation config asks for what cannot be honoured.
    """
    from hyco_export.models.generation_rules import generation_notes, require_generation_rules

    folder = run.source("verifier", run.recipe.models.verifier)
    require_generation_rules(folder)
    for line in generation_notes(folder, run.recipe.sampling):
        note(line)


def require_lengths(run: "RunFolder") -> None:
    """The recipe's texts must fit the positions that the verifier was made for, with one token of a prompt at least.

    Raises:
        RecipeError: one does not; names the field.
    """
    from hyco_export.models.verifier import load_config

    config = load_config(run.source("verifier", run.recipe.models.verifier)).get_text_config()
    limit, capture = config.max_position_embeddings, run.recipe.capture
    wanted = {
        "capture.max_new_tokens": min(capture.max_new_tokens, capture.sequence_limit - 1),
        "capture.validation_max_new_tokens": min(capture.validation_max_new_tokens, capture.sequence_limit - 1),
    }
    if run.recipe.models.head is not None:
        wanted["validation.max_new_tokens"] = run.recipe.validation.max_new_tokens
    for field, tokens in wanted.items():
        if tokens + 1 > limit:
            raise RecipeError(
                f"$.{field}: {tokens} tokens after a prompt leave the {limit} positions of $.models.verifier",
                f"set it to less than {limit}; prompts need room too",
            )


def require_full_precision(run: "RunFolder", stale: Collection[str]) -> None:
    """A verifier that is about to be captured is not quantised, unless the recipe allows it.

    Raises:
        CheckpointError: it is.
    """
    if CAPTURE not in stale or run.recipe.models.allow_quantised_capture:
        return
    from hyco_export.models.families import config_fields
    from hyco_export.models.verifier import load_config

    config_fields.require_full_precision(load_config(run.source("verifier", run.recipe.models.verifier)))


def note_unpinned(run: "RunFolder", note: Callable[[str], None]) -> None:
    """Say which commit stands behind a Hub id that the recipe does not pin: the next run may find another."""
    from hyco_export.models.checkpoints import checkpoint_origin

    for name, checkpoint in msgspec.structs.asdict(run.recipe.models).items():
        if isinstance(checkpoint, Checkpoint) and checkpoint.revision is None:
            _, _, commit = checkpoint_origin(checkpoint, run.source(name, checkpoint)).partition("@")
            if commit:
                note(f"$.models.{name} is not pinned: add revision: {commit} to keep what this run uses")


def origins(run: "RunFolder", stage: Stage) -> dict[str, str]:
    """Where each checkpoint of a stage came from: Hub id and commit, or the recipe's reference."""
    from hyco_export.models.checkpoints import checkpoint_origin

    references = stage.sources(run.recipe).items()
    named = {name: reference for name, reference in references if isinstance(reference, Checkpoint)}
    return {name: checkpoint_origin(reference, run.source(name, reference)) for name, reference in named.items()}
