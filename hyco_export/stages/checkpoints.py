"""What the runner asks of a recipe's checkpoints and records of them. Knows recipes and configs; no weights."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.layout import CAPTURE
from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import RecipeError
from hyco_export.stages.stage import Stage

if TYPE_CHECKING:
    from hyco_export.stages.run_folder import RunFolder


def require_family(run: "RunFolder") -> None:
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


def require_generation(run: "RunFolder", note: Callable[[str], None]) -> None:
    """The verifier's texts must be those that transformers generates; says which of its defaults are not used.

    Raises:
        CheckpointError: its generation config asks for what cannot be honoured.
    """
    from hyco_export.nn.generation_rules import generation_notes, require_generation_rules

    folder = run.source("verifier", run.recipe.models.verifier)
    require_generation_rules(folder)
    for line in generation_notes(folder, run.recipe.sampling):
        note(line)


def require_lengths(run: "RunFolder") -> None:
    """The recipe's texts must fit the positions that the verifier was made for, with one token of a prompt at least.

    Raises:
        RecipeError: one does not; names the field.
    """
    from hyco_export.nn.verifier import load_config

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
