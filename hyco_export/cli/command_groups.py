"""Groups of commands beside the chain, with their options: the workbench's (`inspect`, `bisect`, `doctor`, `recipes`,
`explain`), `profile`, and those of `hyco-export dev ...`."""

from pathlib import Path
from typing import Annotated

import typer

from hyco_export.cli.arguments import (
    CaOption,
    HubDeviceOption,
    InsecureOption,
    RecipeArgument,
    RecipeOption,
    RunOption,
    TargetOption,
    TokenOption,
    only,
)
from hyco_export.errors import HycoError

DEFAULT_FEEDS = 4  # of each graph that `profile` runs: an upload of some megabytes

workbench = typer.Typer()  # its commands stand beside the others
recipes = typer.Typer(help="List the recipes that ship, or print one.", invoke_without_command=True)
workbench.add_typer(recipes, name="recipes")
dev = typer.Typer(
    help="For work on this program: train the embedded family, create checkpoints, compare speeds.",
    no_args_is_help=True,
)


@workbench.command()
def profile(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    device: HubDeviceOption = None,
    feeds: Annotated[
        int | None,
        typer.Option(help="Sample inputs of each graph to run there. Default: 4.", min=1, max=24, show_default=False),
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="Compiled artifact. Default: the run's.", show_default=False)
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="A bundle, over its golden inputs, in place of a run folder.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="With --bundle: outputs and profile.json. Default: BUNDLE-profile.", show_default=False),
    ] = None,
    devices: Annotated[bool, typer.Option("--list-devices", help="List AI Hub's devices and end.")] = False,
) -> None:
    """Run the compiled graphs on a phone of AI Hub: outputs compared, NPU times for bench. Exit 1: outputs differ."""
    of_a_run = {"a recipe": path or recipe, "--run": run, "--target": target, "--feeds": feeds, "--artifact": artifact}
    given = [name for name, value in of_a_run.items() if value is not None]
    if bundle is not None and given:
        raise HycoError(f"--bundle with {', '.join(given)}", "a bundle says all of it: leave that out")
    if bundle is None and out is not None:
        raise HycoError("--out without --bundle", "outputs of a run folder go into it: leave it out")

    from hyco_export.cli.cloud import list_devices, profile_bundle, profile_run

    if devices:
        list_devices()
    elif bundle is not None:
        raise typer.Exit(profile_bundle(bundle, device, out))
    else:
        raise typer.Exit(profile_run(only(path, recipe), run, target, device, feeds or DEFAULT_FEEDS, artifact))


@workbench.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact folder, a bundle, or a file: ONNX, .bin, safetensors, ...")],
    other: Annotated[
        Path | None, typer.Argument(help="A second one: show how they differ.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
) -> None:
    """Show an artifact's manifest, checked file by file, what a file says of itself, or how two differ (exit 1)."""
    from hyco_export.cli.workbench.inspection import inspect_path

    raise typer.Exit(inspect_path(path, other, as_json))


@workbench.command()
def bisect(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    graph: Annotated[str, typer.Option(help="head, slm_tree or slm_prefill.")] = "slm_tree",
    reference: Annotated[str, typer.Option(help="torch, onnx-cpu, qnn, or a folder with outputs.")] = "torch",
    candidate: Annotated[str, typer.Option(help="The same; what is doubted.")] = "onnx-cpu",
    feeds: Annotated[int, typer.Option(help="Sample inputs to run.", min=1)] = 1,
    tensors: Annotated[str, typer.Option(help="Inner tensors to look at, by a shell pattern.")] = "*",
    out: Annotated[Path | None, typer.Option(help="Table and picture. Default: <run>/bisect.")] = None,
    probe: Annotated[
        Path | None, typer.Option(help="Write a pair that gives out all tensors, and inputs, for a phone.")
    ] = None,
) -> None:
    """Find the tensor of a graph at which two back ends part. Exit 1 when they do."""
    from hyco_export.cli.workbench.bisection import BisectOptions, run_bisect

    options = BisectOptions(graph, reference, candidate, feeds, tensors, out, probe)
    raise typer.Exit(run_bisect(only(path, recipe), run, target, options))


@workbench.command()
def doctor(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    server: Annotated[str | None, typer.Option("--server", help="Also ask this server.", show_default=False)] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check this machine, a run folder and a server, and say what is blocked. Exit 1 when something is."""
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.workbench.doctor import run_doctor

    reach = connect_options(token_file, ca, insecure, None, False)
    raise typer.Exit(run_doctor(only(path, recipe), run, server, reach, as_json))


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes that ship, or print one."""
    from hyco_export.cli.workbench.recipes import list_recipes

    if context.invoked_subcommand is None:
        list_recipes()


@recipes.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="Name of a recipe that ships.")]) -> None:
    """Print a recipe's file, to begin your own with."""
    from hyco_export.cli.workbench.recipes import print_recipe

    print_recipe(name)


@workbench.command()
def explain(text: Annotated[str, typer.Argument(help="An error text or code of the NPU's libraries.")]) -> None:
    """Say cause and cure of a vendor's error, such as one from a phone's log. Exit 1: it is not known."""
    from hyco_export.cli.workbench.doctor import explain_text

    raise typer.Exit(explain_text(text))


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
    from hyco_export.cli.dev.speed import bench_peers

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
    from hyco_export.cli.dev.speed import measure_counting

    measure_counting(only(path, recipe), run, tokenizer, created)


@dev.command("train-tiny")
def train_tiny(
    out: Annotated[Path, typer.Argument(help="New folder for the three checkpoints.")],
    quick: Annotated[bool, typer.Option(help="A handful of steps: right shapes, no skill.")] = False,
) -> None:
    """Train the embedded family again from the text on this machine."""
    _require_new(out)

    from hyco_export.cli.dev.checkpoints import train_tiny_family

    train_tiny_family(out, quick)


@dev.command("create-checkpoints")
def create_checkpoints(
    out: Annotated[Path, typer.Argument(help="New folder for three checkpoints, prompts and a recipe.")],
    scale: Annotated[
        str,
        typer.Option(
            help="full: shapes of Gemma 4 26B-A4B's head and hand-off and of E2B, 4.7 GB; thin: its vocabulary, keep "
            "set, window and rings, with tiny layers; middle; small; respelled: the embedded family with an SLM of "
            "another vocabulary."
        ),
    ] = "full",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer to fill up. Default: the embedded family's.")
    ] = None,
) -> None:
    """Write checkpoints with random weights in real shapes, to try a pipeline without the real ones."""
    _require_new(out)

    from hyco_export.cli.dev.checkpoints import create_checkpoint_family

    create_checkpoint_family(out, scale, tokenizer)


@dev.command("fit-estimates")
def fit_estimates(
    scales: Annotated[
        list[str] | None, typer.Option("--scale", help="full, middle, small; several are better.")
    ] = None,
) -> None:
    """Measure the stages on created checkpoints; print the coefficients of --dry-run's estimates that fit."""
    from hyco_export.cli.dev.checkpoints import refit_estimates

    refit_estimates(scales or ["small", "middle"])


def _require_new(out: Path) -> None:
    """Asked before anything heavy is imported.

    Raises:
        HycoError: the folder exists.
    """
    if out.exists():
        raise HycoError(f"{out} exists already", "give a new folder")
