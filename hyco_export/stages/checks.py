"""What checkpoints and data forbid, of the whole family and of every stage; asked before the first stage works."""

from collections.abc import Callable, Collection, Sequence
from itertools import chain

import msgspec

from hyco_export.core.artifact import CAPTURE
from hyco_export.core.data.conversations import identities
from hyco_export.core.data.prompts import require_counted, require_prompts
from hyco_export.core.data.readers import list_files, read_conversations
from hyco_export.core.data.sources import OnCount, local_folders
from hyco_export.core.memory import release_freed
from hyco_export.core.recipe import Checkpoint
from hyco_export.core.recipe_sections import as_source
from hyco_export.errors import RecipeError
from hyco_export.models.checkpoints import checkpoint_origin
from hyco_export.models.families import config_fields
from hyco_export.models.families.checks import check_family, check_vocabularies, family_remarks
from hyco_export.models.generation_rules import generation_notes, require_generation_rules
from hyco_export.models.verifier import load_config
from hyco_export.stages.declarations import Progress, Stage
from hyco_export.stages.plan import PlannedStage
from hyco_export.stages.run_folder import RunFolder


def prepare_data(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Write the conversations that no local path holds, and refuse prompts that cannot be used, before any stage."""
    stale = [item.stage.sources(run.recipe) for item in planned if not item.fresh]
    references = {name: source for sources in stale for name, source in sources.items()}
    data = {name: source for name, source in references.items() if not isinstance(source, Checkpoint)}
    for name, source in data.items():
        run.source(name, source, _reading(name, as_source(source).limit, progress))
        for folder in local_folders(source, run.recipe_folder):
            if remark := list_files(folder).remark:
                progress.note(f"$.data.{name}: {remark}")
    paths = {name: run.source(name, source) for name, source in data.items()}
    if "calibration" in data and "validation" in data:
        require_prompts(paths["calibration"], paths["validation"], run.recipe.validation.prompts)
    if "conversations" in data:
        asked = (read_conversations(paths[name]) for name in ("calibration", "validation") if name in data)
        found, field = read_conversations(paths["conversations"]), f"$.data.conversations: {paths['conversations']}"
        _, remarks = require_counted(found, field, identities(chain(*asked)))
        for remark in remarks:
            progress.note(f"$.data.conversations: {remark}")


def _reading(name: str, limit: int | None, progress: Progress) -> OnCount:
    """Shows how many conversations of a data source are read."""
    return lambda done: progress.step(f"{name} read", done, limit or done)


def check_all(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Ask what the checkpoints and every stage that will be built forbid, before the first one works for minutes."""
    stale = [item.stage for item in planned if not item.fresh]
    if stale:
        check_sources(run, stale, progress.note)
    note_unpinned(run, progress.note)


def check_sources(run: RunFolder, stages: Sequence[Stage], note: Callable[[str], None]) -> None:
    """What checkpoints and data forbid of stages that will be built; reads those that are here, writes nothing.

    Raises:
        CheckpointError, RecipeError: the first thing that cannot work.
    """
    require_family(run)
    _note_family(run, note)
    require_generation(run, note)
    require_lengths(run)
    require_full_precision(run, {stage.name for stage in stages})
    for stage in stages:
        stage.check(stage.config(run.recipe), run.sources_at_hand(stage))


def _note_family(run: RunFolder, note: Callable[[str], None]) -> None:
    """What of verifier and head belongs together by their configs, and is still to be looked at."""
    models = run.recipe.models
    if models.head is None:
        return
    folders = (run.source("verifier", models.verifier), run.source("head", models.head))
    for remark in family_remarks(*map(load_config, folders)):
        note(remark)


def require_family(run: RunFolder) -> None:
    """The recipe's checkpoints must belong together; told by their configs, and by the ids of their tokens.

    Raises:
        CheckpointError: they do not; all mismatches are named.
    """
    models, bridged = run.recipe.models, bool(run.recipe.slm.bridge)
    named = (("verifier", models.verifier), ("head", models.head), ("slm", models.slm))
    folders = {name: run.source(name, checkpoint) for name, checkpoint in named if checkpoint is not None}
    configs = {name: load_config(folder) for name, folder in folders.items()}
    check_family(configs["verifier"], configs.get("head"), configs["slm"], bridged)
    if not bridged:
        check_vocabularies(folders["verifier"], folders["slm"], configs["verifier"].get_text_config().vocab_size)
        release_freed()


def require_generation(run: RunFolder, note: Callable[[str], None]) -> None:
    """The verifier's texts must be those that transformers generates; says which of its defaults are not used.

    Raises:
        CheckpointError: its generation config asks for what cannot be honoured.
    """
    folder = run.source("verifier", run.recipe.models.verifier)
    require_generation_rules(folder)
    for line in generation_notes(folder, run.recipe.sampling):
        note(line)


def require_lengths(run: RunFolder) -> None:
    """The recipe's texts must fit the positions that the verifier was made for, with one token of a prompt at least.

    Raises:
        RecipeError: one does not; names the field.
    """
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


def require_full_precision(run: RunFolder, stale: Collection[str]) -> None:
    """A verifier that is about to be captured is not quantised, unless the recipe allows it.

    Raises:
        CheckpointError: it is.
    """
    if CAPTURE not in stale or run.recipe.models.allow_quantised_capture:
        return

    config_fields.require_full_precision(load_config(run.source("verifier", run.recipe.models.verifier)))


def note_unpinned(run: RunFolder, note: Callable[[str], None]) -> None:
    """Say which commit stands behind a Hub id that the recipe does not pin: the next run may find another."""
    for name, checkpoint in msgspec.structs.asdict(run.recipe.models).items():
        if isinstance(checkpoint, Checkpoint) and checkpoint.revision is None:
            _, _, commit = checkpoint_origin(checkpoint, run.source(name, checkpoint)).partition("@")
            if commit:
                note(f"$.models.{name} is not pinned: add revision: {commit} to keep what this run uses")
