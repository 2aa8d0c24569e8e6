"""What `report` does: read what was measured, find the texts of its tokens, write the page."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.cli.console import output, show_next
from hyco_export.cli.invocation import command_line, imply
from hyco_export.cli.options import open_run
from hyco_export.core.numerics import BYTES_PER_MB
from hyco_export.errors import HycoError, StorageError, counted

if TYPE_CHECKING:
    from hyco_export.evaluate.page.sources import Source
    from hyco_export.evaluate.page.texts import Texts
    from hyco_export.stages.run_folder import RunFolder

PAGE_FILE = "report.html"
DECODING_HINT = "tokens are shown as ids; give --recipe of the run for their texts"


def write_report(
    folders: Sequence[Path], out: Path | None, recipe: Path | None, run_dir: Path | None, rounds_wanted: int | None
) -> None:
    """Write the page and say where it is.

    Raises:
        HycoError: a folder without a measurement, a recipe that cannot be used, or a folder where the page goes.
    """
    from hyco_export.evaluate.page.page import write_page
    from hyco_export.evaluate.page.rounds import MOST_ROUNDS, every_nth
    from hyco_export.evaluate.page.sources import read_sources, run_of

    first = folders[0]
    path = out or (first.parent if first.is_file() else first) / PAGE_FILE
    if path.is_dir():
        raise StorageError(f"{path} is a folder", f"give a file: --out {shlex.quote(str(path / PAGE_FILE))}")
    sources = read_sources(folders)
    root = run_dir or next(filter(None, map(run_of, folders)), None)
    if root is not None:
        imply(run=root)
    texts, note = find_texts(sources, recipe, root)
    most = rounds_wanted or MOST_ROUNDS
    size = write_page(sources, texts, path, most)
    rounds = sum(source.rounds for source in sources)
    if (every := every_nth(sources, most)) > 1:
        output.print(f"note: the page holds one answer in {every}; --rounds {rounds} holds all", style="dim")
    if note:
        output.print(f"note: {note}", style="dim", soft_wrap=True)
    told = f"{counted(len(sources), 'folder')}, {counted(rounds, 'round')}, {size / BYTES_PER_MB:.1f} MB"
    output.print(f"page: {path} ({told})", soft_wrap=True)
    show_next(next_command(sources))


def next_command(sources: Sequence["Source"]) -> str:
    """Judge the recorded trees by other rules where they can be; else measure more."""
    from hyco_export.evaluate.metrics import headline
    from hyco_export.evaluate.page.sources import has_evidence

    for source in sources:
        recorded = [name for name, traces in source.traces.items() if has_evidence({name: traces})]
        if recorded:
            given = Path(source.traces_at)
            file = given if given.is_file() else given / f"{headline(recorded)}.jsonl"
            return f"{command_line('replay')} {shlex.quote(str(file))}"
    return command_line("bench")


def find_texts(sources: Sequence["Source"], recipe: Path | None, root: Path | None) -> tuple["Texts", str]:
    """The texts of tokens and prompts by the recipe's verifier, where it is at hand and the one that was measured; else
    ids, and why.

    Raises:
        RecipeError: a recipe was given and cannot be used.
    """
    from hyco_export.evaluate.page.texts import Texts

    if not any(source.traces for source in sources):
        return Texts(), ""
    if recipe is None and root is None and not any(source.verifier for source in sources):
        return Texts(), f"the traces do not say which verifier drew them: {DECODING_HINT}"
    run = open_run(recipe, root)
    try:
        return _texts_of(run, {source.verifier for source in sources if source.verifier})
    except HycoError as error:
        return Texts(), f"{error.message}: {DECODING_HINT}"


def _texts_of(run: "RunFolder", wanted: set[str]) -> tuple["Texts", str]:
    from hyco_export.evaluate.page.texts import Texts, prompt_texts
    from hyco_export.models.checkpoints import checkpoint_digest, local_checkpoint, next_step
    from hyco_export.models.text.tokenizer import open_tokenizer

    verifier = run.recipe.models.verifier
    folder = local_checkpoint(verifier, run.recipe_folder)
    if folder is None:
        step = next_step(verifier, run.recipe_folder)
        return Texts(), f"the verifier of recipe {run.recipe.name} is not on this machine ({step}): tokens are ids"
    if wanted and wanted != {checkpoint_digest(folder)}:
        return Texts(), f"recipe {run.recipe.name} has another verifier than was measured: {DECODING_HINT}"
    prompts = run.at_hand("validation", run.recipe.data.validation)
    return Texts(open_tokenizer(folder).backend, prompt_texts(prompts or ())), ""
