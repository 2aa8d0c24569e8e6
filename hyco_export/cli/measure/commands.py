"""Commands that measure answers, with their options."""

from pathlib import Path
from typing import Annotated

import typer

measuring = typer.Typer()  # its commands stand beside the others


@measuring.command()
def judge(
    folder: Annotated[Path, typer.Argument(help="An evaluation's folder.")],
    model: Annotated[str, typer.Option(help="The judge's model, as the endpoint calls it.")],
    base_url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint.")] = "https://api.openai.com/v1",
    key_variable: Annotated[str, typer.Option(help="Environment variable with the key.")] = "OPENAI_API_KEY",
    systems: Annotated[
        str | None, typer.Option(help="Only these, by commas. Default: all.", show_default=False)
    ] = None,
    first_turns: Annotated[bool, typer.Option("--first-turns", help="Judge first turns alone, as the paper.")] = False,
    helmet_prompts: Annotated[
        Path | None, typer.Option(help="HELMET's scripts/eval_gpt4_summ.py, for book summaries.")
    ] = None,
    helmet_references: Annotated[
        list[Path] | None, typer.Option(help="JSONL with id, keypoints, answer; may be repeated.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Calls at a time.", min=1, max=256)] = 4,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one attempt of a call.", min=1.0)] = 120.0,
    retries: Annotated[int, typer.Option(help="Attempts after the first.", min=0)] = 5,
    retry_missing: Annotated[
        bool, typer.Option("--retry-missing", help="Ask again where a reply held no score.")
    ] = False,
    price_in: Annotated[float | None, typer.Option(help="Price of a million tokens sent.", min=0.0)] = None,
    price_out: Annotated[float | None, typer.Option(help="Price of a million tokens of replies.", min=0.0)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send the key without TLS.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print calls and tokens, and ask nothing.")] = False,
) -> None:
    """Let a language model score the answers of an evaluation; a run that was stopped goes on."""
    from hyco_export.cli.bench import split_names
    from hyco_export.cli.measure.judge import JudgeOptions, judge_folder
    from hyco_export.evaluate.quality.judge.endpoint import Endpoint
    from hyco_export.evaluate.quality.judge.log import Prices

    endpoint = Endpoint(model, base_url, key_variable, timeout_s, retries, insecure)
    chosen = split_names(systems) if systems is not None else None
    references = tuple(helmet_references or ())
    options = JudgeOptions(chosen, first_turns, helmet_prompts, references, concurrency, retry_missing, dry_run)
    judge_folder(folder, endpoint, options, Prices(price_in, price_out))


@measuring.command()
def contrast(
    folders: Annotated[list[Path], typer.Argument(help="Evaluations' folders; systems of several are put together.")],
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="System that others are held against; may be repeated. Default: the first.", show_default=False
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the contrasts there.")] = None,
) -> None:
    """Compare systems over the same questions: server time and scores, with paired 95 % intervals."""
    from hyco_export.cli.measure.contrast import contrast_folders

    contrast_folders(folders, baseline or [], json_path)
