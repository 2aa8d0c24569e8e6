"""What the runner asks of a recipe's checkpoints and records of them. Knows recipes and configs; no weights."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.layout import CAPTURE
from hyco_export.core.recipe import Checkpoint
from hyco_export.stages.stage import Stage

if TYPE_CHECKING:
    from hyco_export.stages.run_folder import RunFolder


def require_full_precision(run: "RunFolder", stale: Collection[str]) -> None:
    """A verifier that is about to be captured is not quantised, unless the recipe allows it.

    Raises:
        CheckpointError: it is.
    """
    if CAPTURE not in stale or run.recipe.models.allow_quantised_capture:
        return
    from hyco_export.nn import model_types
    from hyco_export.nn.verifier import load_config

    model_types.require_full_precision(load_config(run.source("verifier", run.recipe.models.verifier)))


def note_unpinned(run: "RunFolder", note: Callable[[str], None]) -> None:
    """Say which commit stands behind a Hub id that the recipe does not pin: the next run may find another."""
    from hyco_export.nn.checkpoint import checkpoint_origin

    for name, checkpoint in msgspec.structs.asdict(run.recipe.models).items():
        if isinstance(checkpoint, Checkpoint) and checkpoint.revision is None:
            _, _, commit = checkpoint_origin(checkpoint, run.source(name, checkpoint)).partition("@")
            if commit:
                note(f"$.models.{name} is not pinned: add revision: {commit} to keep what this run uses")


def origins(run: "RunFolder", stage: Stage) -> dict[str, str]:
    """Where each checkpoint of a stage came from: Hub id and commit, or the recipe's reference."""
    from hyco_export.nn.checkpoint import checkpoint_origin

    references = stage.sources(run.recipe).items()
    named = {name: reference for name, reference in references if isinstance(reference, Checkpoint)}
    return {name: checkpoint_origin(reference, run.source(name, reference)) for name, reference in named.items()}
