"""The commands of `hyco-export dev ...` with their options."""

from pathlib import Path
from typing import Annotated

import typer

from hyco_export.cli.arguments import RecipeArgument, RecipeOption, RunOption, only
from hyco_export.errors import HycoError

dev = typer.Typer(
    help="For work on this program: train the embedded family, create checkpoints, compare speeds.",
    no_args_is_help=True,
)


@dev.command("bench-peers")
def bench_peers(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    prompts: Annotated[int, typer.Option(help="Validation prompts to answer.", min=1)] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1)] = 128,
    vllm_python: Annotated[
        Path | None, typer.Option(help="A Python that has vLLM's CPU build. Default: vLLM is left out.")
    ] = None,
) -> None:
    """Answer greedily beside transformers and vLLM on the same weights. Exit 1 when a text differs, or when the
    server is not twice as fast as transformers with the same head."""
    from hyco_export.cli.dev_speed import bench_peers

    raise typer.Exit(bench_peers(only(path, recipe), run, prompts, max_new_tokens, vllm_python))


@dev.command("bench-counting")
def bench_counting(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with a tokenizer.json. Default: the recipe's verifier.")
    ] = None,
    created: Annotated[
        int | None, typer.Option(help="Count this many created conversations, not the recipe's.", min=1)
    ] = None,
) -> None:
    """Measure the keep set's counting against the tokenizer's raw speed."""
    from hyco_export.cli.dev_speed import measure_counting

    measure_counting(only(path, recipe), run, tokenizer, created)


@dev.command("train-tiny")
def train_tiny(
    out: Annotated[Path, typer.Argument(help="New folder for the three checkpoints.")],
    quick: Annotated[bool, typer.Option(help="A handful of steps: right shapes, no skill.")] = False,
) -> None:
    """Train the embedded family again from the text on this machine."""
    _require_new(out)

    from hyco_export.cli.dev_checkpoints import train_tiny_family

    train_tiny_family(out, quick)


@dev.command("create-checkpoints")
def create_checkpoints(
    out: Annotated[Path, typer.Argument(help="New folder for three checkpoints, prompts and a recipe.")],
    scale: Annotated[
        str,
        typer.Option(
            help="full: shapes of Gemma 4 26B-A4B's head and hand-off and of E2B, 4.7 GB; middle; small; "
            "respelled: the embedded family with an SLM of another vocabulary."
        ),
    ] = "full",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer to fill up. Default: the embedded family's.")
    ] = None,
) -> None:
    """Write checkpoints with random weights in real shapes, to try a pipeline without the real ones."""
    _require_new(out)

    from hyco_export.cli.dev_checkpoints import create_checkpoint_family

    create_checkpoint_family(out, scale, tokenizer)


@dev.command("fit-estimates")
def fit_estimates(
    scales: Annotated[
        list[str] | None, typer.Option("--scale", help="full, middle, small; several are better.")
    ] = None,
) -> None:
    """Measure the stages on created checkpoints; print the coefficients of --dry-run's estimates that fit."""
    from hyco_export.cli.dev_checkpoints import refit_estimates

    refit_estimates(scales or ["small", "middle"])


def _require_new(out: Path) -> None:
    """Asked before anything heavy is imported.

    Raises:
        HycoError: the folder exists.
    """
    if out.exists():
        raise HycoError(f"{out} exists already", "give a new folder")
