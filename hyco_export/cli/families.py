"""What the commands that make checkpoints do: the embedded family trained again, or created ones."""

from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_next
from hyco_export.cli.invocation import command_line
from hyco_export.errors import HycoError

PERCENT = 100
RESPELLED = "respelled"  # not a scale: the embedded family with an SLM of another vocabulary


def require_new(out: Path) -> None:
    """Asked before anything heavy is imported.

    Raises:
        HycoError: the folder exists.
    """
    if out.exists():
        raise HycoError(f"{out} exists already", "give a new folder")


def train_tiny_family(out: Path, quick: bool) -> None:
    """Train the embedded family into a new folder."""
    require_new(out)
    from hyco_export.nn.created.new_folder import new_folder
    from hyco_export.nn.tiny.family import DEFAULT_SEED, train_family

    with ConsoleProgress() as progress, new_folder(out) as partial:
        train_family(
            partial,
            seed=DEFAULT_SEED,
            quick=quick,
            on_progress=lambda label, share: progress.step(label, round(PERCENT * share), PERCENT),
        )
    output.print((out / "MODEL_CARD.md").read_text(encoding="utf-8"))


def create_checkpoint_family(out: Path, scale_name: str, tokenizer: Path | None) -> None:
    """Write created checkpoints into a new folder; print the command that runs them."""
    require_new(out)
    if scale_name == RESPELLED:
        from hyco_export.nn.created.respelled import create_respelled

        show_next(command_line("run", recipe=create_respelled(out)))
        return
    from hyco_export.nn.created.family import DEFAULT_SEED, create_family
    from hyco_export.nn.created.recipe import RECIPE_FILE
    from hyco_export.nn.created.scale import find_scale

    scale = find_scale(scale_name)
    with ConsoleProgress() as progress:
        create_family(
            out,
            scale,
            tokenizer,
            DEFAULT_SEED,
            lambda label, share: progress.step(label, int(PERCENT * share), PERCENT),
        )
    show_next(command_line("run", recipe=out / RECIPE_FILE))
