"""What `dev train-tiny`, `dev create-checkpoints` and `dev fit-estimates` do."""

from collections.abc import Sequence
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.dev.created import family as created
from hyco_export.dev.created.recipe import RECIPE_FILE, new_folder
from hyco_export.dev.created.tokenizer import create_respelled
from hyco_export.dev.estimate_fit import fit_estimates
from hyco_export.dev.tiny import family as tiny
from hyco_export.models.families.released_configs import find_scale

PERCENT = 100
RESPELLED = "respelled"  # not a scale: the embedded family with an SLM of another vocabulary


def train_tiny_family(out: Path, quick: bool) -> None:
    """Train the embedded family into a new folder."""
    with ConsoleProgress() as progress, new_folder(out) as partial:
        tiny.train_family(
            partial,
            seed=tiny.DEFAULT_SEED,
            quick=quick,
            on_progress=lambda label, share: progress.step(label, round(PERCENT * share), PERCENT),
        )
    output.print((out / "MODEL_CARD.md").read_text(encoding="utf-8"))


def create_checkpoint_family(out: Path, scale_name: str, tokenizer: Path | None) -> None:
    """Write created checkpoints into a new folder; print the command that runs them."""
    if scale_name == RESPELLED:
        show_next(command_line("run", recipe=create_respelled(out)))
        return
    scale = find_scale(scale_name)
    with ConsoleProgress() as progress:
        created.create_family(
            out,
            scale,
            tokenizer,
            created.DEFAULT_SEED,
            lambda label, share: progress.step(label, int(PERCENT * share), PERCENT),
        )
    show_next(command_line("run", recipe=out / RECIPE_FILE))


def refit_estimates(scale_names: Sequence[str]) -> None:
    """Print the fitted coefficients, and how far the estimates are off without and with them."""
    scales = [find_scale(name) for name in scale_names]
    with ConsoleProgress() as progress:
        fit = fit_estimates(scales, progress.step)
    show_rows("estimates beside what the stages took", fit.errors)
    show_rows("coefficients: write those that differ into core/estimates/coefficients.py", fit.table)
