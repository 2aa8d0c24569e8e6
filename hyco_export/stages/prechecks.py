"""What is asked before the first stage of a plan works for minutes: data written and usable, checkpoints that belong
together, and what each stage itself forbids.

Knows which question is asked when; the answers are others'.
"""

from collections.abc import Callable, Sequence
from itertools import chain

from hyco_export.core.data.files import list_files, read_conversations
from hyco_export.core.data.identity import identities
from hyco_export.core.data.prompts import require_counted, require_prompts
from hyco_export.core.data.reading import OnCount, local_folders
from hyco_export.core.data.source import as_source
from hyco_export.core.recipe import Checkpoint
from hyco_export.stages.checkpoints import (
    note_unpinned,
    require_family,
    require_full_precision,
    require_generation,
    require_lengths,
)
from hyco_export.stages.plan import PlannedStage
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.stage import Progress, Stage


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
        _, remark = require_counted(found, field, identities(chain(*asked)))
        if remark:
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
    require_generation(run, note)
    require_lengths(run)
    require_full_precision(run, {stage.name for stage in stages})
    for stage in stages:
        stage.check(stage.config(run.recipe), run.sources_at_hand(stage))
