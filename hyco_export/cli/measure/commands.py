"""Commands that measure answers, with their options."""

from pathlib import Path
from typing import Annotated

import typer

from hyco_export.cli.arguments import (
    CaOption,
    InsecureOption,
    LinkOption,
    LinkWaitsOption,
    PerCategoryOption,
    PromptLimitOption,
    PromptSetOption,
    RecipeArgument,
    RecipeOption,
    RunOption,
    TargetOption,
    TokenOption,
    TruncateOption,
    only,
)

measuring = typer.Typer()  # its commands stand beside the others


@measuring.command()
def evaluate(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a running server. Default: one of its own.", show_default=False)
    ] = None,
    prompts: PromptSetOption = None,
    per_category: PerCategoryOption = None,
    limit: PromptLimitOption = None,
    truncate: TruncateOption = None,
    references: Annotated[
        list[str] | None,
        typer.Option(help="File or hf:// address of a set's own references; may be repeated.", show_default=False),
    ] = None,
    systems: Annotated[str, typer.Option(help="Names, the baseline first.")] = "cloud-mtp,hyco-exact,hyco",
    backend: Annotated[str, typer.Option(help="Device back end: torch, onnx-cpu, qnn.")] = "onnx-cpu",
    generations: Annotated[int, typer.Option(help="Answers to every question, each with other draws.", min=1)] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of an answer. Default: the recipe's.", min=2, show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Everything goes here. Default: <run>/evaluation.", show_default=False)
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed answers once more.")] = False,
    without_evidence: Annotated[
        bool, typer.Option("--without-evidence", help="Traces without p~: smaller, and no replay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much would be made, and end.")] = False,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
    link: LinkOption = None,
    link_waits: LinkWaitsOption = False,
) -> None:
    """Let systems answer a set's questions, and score the answers; a run that was stopped goes on."""
    from hyco_export.cli.bench import split_names
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.measure.evaluate import EvaluateOptions, evaluate_run
    from hyco_export.cli.measure.set_options import SetOptions

    options = EvaluateOptions(
        systems=split_names(systems),
        backend=backend,
        asked=SetOptions(prompts, per_category, limit, truncate),
        references=tuple(references or ()),
        generations=generations,
        max_new_tokens=max_new_tokens,
        out=out,
        retry_failed=retry_failed,
        evidence=not without_evidence,
        dry_run=dry_run,
    )
    connecting = connect_options(token_file, ca, insecure, link, link_waits)
    evaluate_run(server, only(path, recipe), run, target, options, connecting)


@measuring.command()
def tables(
    folders: Annotated[list[Path], typer.Argument(help="Folders of bench, evaluate or validate --traces.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures there.", show_default=False)
    ] = None,
) -> None:
    """Print the paper's smaller tables from traces: acceptance by head and keep set, chain, threshold, first token."""
    from hyco_export.cli.measure.tables import print_tables

    print_tables(folders, json_path)
