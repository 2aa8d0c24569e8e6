"""Commands of this folder with their options: `report`."""

from pathlib import Path
from typing import Annotated

import typer

from hyco_export.cli.arguments import RecipeOption

measure = typer.Typer()  # its commands stand beside the others


@measure.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of bench, evaluate or traces; several side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file. Default: report.html in the first folder.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds on the page, about; figures are of all. Default: 20000.", min=1)
    ] = None,
    recipe: RecipeOption = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run folder of the traces. Default: the one that a folder is in.")
    ] = None,
) -> None:
    """Write one HTML file to read measurements on: figures with intervals, distributions, every round step by step."""
    from hyco_export.cli.measure.report import write_report

    write_report(folders, out, recipe, run, rounds)
