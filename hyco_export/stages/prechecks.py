"""What is asked before the first stage of a plan works for minutes: data written and usable, checkpoints that belong
together, and what each stage itself forbids.

Knows which question is asked when; the answers are others'.
"""

from collections.abc import Sequence

from hyco_export.core.data.prompts import require_conversations, require_prompts
from hyco_export.core.data.reading import OnCount
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
from hyco_export.stages.stage import Progress


def prepare_data(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Write the conversations that no local path holds, and refuse prompts that cannot be used, before any stage."""
    stale = [item.stage.sources(run.recipe) for item in planned if not item.fresh]
    references = {name: source for sources in stale for name, source in sources.items()}
    data = {name: source for name, source in references.items() if not isinstance(source, Checkpoint)}
    for name, source in data.items():
        run.source(name, source, _reading(name, as_source(source).limit, progress))
    if "conversations" in data:
        require_conversations(run.source("conversations", data["conversations"]), "$.data.conversations")
    if "calibration" in data and "validation" in data:
        paths = {name: run.source(name, data[name]) for name in ("calibration", "validation")}
        require_prompts(paths["calibration"], paths["validation"], run.recipe.validation.prompts)


def _reading(name: str, limit: int | None, progress: Progress) -> OnCount:
    """Shows how many conversations of a data source are read."""
    return lambda done: progress.step(f"{name} read", done, limit or done)


def check_all(run: RunFolder, planned: Sequence[PlannedStage], progress: Progress) -> None:
    """Ask what the checkpoints and every stage that will be built forbid, before the first one works for minutes."""
    stale = [item for item in planned if not item.fresh]
    if stale:
        require_family(run)
        require_generation(run, progress.note)
        require_lengths(run)
    require_full_precision(run, {item.stage.name for item in stale})
    note_unpinned(run, progress.note)
    for item in stale:
        item.stage.check(item.stage.config(run.recipe), run.sources(item.stage))
