"""Commands that measure, plan and show, with their options; each has its body in a module of `measure/`."""

from pathlib import Path
from typing import Annotated

import typer

from hyco_export.cli.arguments import (
    BackendOption,
    CaOption,
    DryRunOption,
    InsecureOption,
    LinkOption,
    LinkWaitsOption,
    OwnServerOption,
    PerCategoryOption,
    PromptLimitOption,
    PromptSetOption,
    RecipeArgument,
    RecipeOption,
    RunOption,
    ServerDeviceOption,
    SystemsOption,
    TargetOption,
    TokenOption,
    TruncateOption,
    only,
)
from hyco_export.cli.command_groups import dev

measuring = typer.Typer()  # its commands stand beside the others


@measuring.command()
def evaluate(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    server: OwnServerOption = None,
    prompts: PromptSetOption = None,
    per_category: PerCategoryOption = None,
    limit: PromptLimitOption = None,
    truncate: TruncateOption = None,
    references: Annotated[
        list[str] | None,
        typer.Option(help="File or hf:// address of a set's own references; may be repeated.", show_default=False),
    ] = None,
    systems: SystemsOption = "cloud-mtp,hyco-exact,hyco",
    device: ServerDeviceOption = None,
    backend: BackendOption = "onnx-cpu",
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
    judge: Annotated[
        str | None,
        typer.Option("--judge", help="Model that then scores the answers, as `judge --model`.", show_default=False),
    ] = None,
    judge_url: Annotated[str, typer.Option(help="Its OpenAI-compatible endpoint.")] = "https://api.openai.com/v1",
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

    endpoint = None
    if judge is not None:
        from hyco_export.evaluate.quality.judge.endpoint import Endpoint

        endpoint = Endpoint(judge, judge_url)
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
        judge=endpoint,
    )
    connecting = connect_options(token_file, ca, insecure, link, link_waits)
    evaluate_run(server, only(path, recipe), run, target, options, connecting, device)


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


@measuring.command()
def plan(
    traces: Annotated[
        Path | None,
        typer.Argument(help="Folder of bench or evaluate. Default: the paper's figures.", show_default=False),
    ] = None,
    inputs: Annotated[
        list[Path] | None, typer.Option(help="File of inputs, or paper-32k; may be repeated.", show_default=False)
    ] = None,
    device_times: Annotated[
        str | None, typer.Option(help="A phone's profile.json, or `paper`.", show_default=False)
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="lte, 5g-nsa, wifi, `paper`, or a CSV of from_s,rtt_ms,down_mbit_s,up_mbit_s.")
    ] = None,
    server_times: Annotated[
        str | None,
        typer.Option(help="Rows and ms of passes: JSON, CSV, a server's URL, or `paper`.", show_default=False),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="System to compare with. Default: the first.")] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer. Default: as seen.", min=2)] = None,
    clients: Annotated[int, typer.Option(help="Clients on one server.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Calls in one pass of the server, at most.", min=1)] = 8,
    answers: Annotated[int, typer.Option(help="Answers to simulate for each client.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of everything random.", min=0)] = 20261011,
    out: Annotated[Path, typer.Option("--out", help="Also write the plan there.")] = Path("plan.json"),
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Simulate the systems with given times, link and acceptance, and say which to choose for which aim."""
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.measure.plan import Places, plan_run
    from hyco_export.evaluate.planning.simulation import Options

    places = Places(traces, baseline, tuple(inputs or ()), device_times, link, server_times, answer_tokens)
    connecting = connect_options(token_file, ca, insecure, None, False)
    plan_run(places, Options(clients, batch, answers, seed), connecting, out)


@measuring.command()
def sweep(
    grid: Annotated[Path, typer.Argument(help="YAML of `fields`, each with a list of values, and of single `points`.")],
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder. Default: <run>/sweep.", show_default=False)] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Folder of an evaluation, whose answers are judged.", show_default=False)
    ] = None,
    metric: Annotated[str, typer.Option(help="Of the evaluation: the third aim.")] = "judge",
    link: LinkOption = None,
    link_waits: LinkWaitsOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Try a grid of configurations, each distinct artifact and run made once; the trade-off as table and picture."""
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.measure.sweep import SweepOptions, sweep_run

    connecting = connect_options(None, None, False, link, link_waits)
    sweep_run(recipe, run, target, SweepOptions(grid, out, evaluation, metric, dry_run), connecting)


@dev.command("node-scores")
def node_scores(
    traces: Annotated[list[Path], typer.Argument(help="JSONL files with p~ and trees larger than the budgets.")],
    budget: Annotated[
        list[int] | None, typer.Option(help="Nodes to keep; may be repeated. Default: 8, 16, 32.", show_default=False)
    ] = None,
) -> None:
    """Compare the tree's scores with scores calibrated from traces, on prompts that they were not fitted on."""
    from hyco_export.cli.measure.node_scores import compare_scores

    compare_scores(traces, budget or [8, 16, 32])


@measuring.command()
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


@measuring.command()
def chat(
    server: Annotated[str, typer.Option("--server", help="URL of a running `hyco-export serve`.")],
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    system: Annotated[str, typer.Option(help="Who drafts, and by which rule tokens are taken.")] = "hyco",
    backend: BackendOption = "onnx-cpu",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of a reply. Default: the recipe's.", min=2, show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the verifier's draws. Default: the recipe's.", min=0, show_default=False)
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0 in place of the recipe's sampling.")] = False,
    without_evidence: Annotated[
        bool, typer.Option("--without-evidence", help="Smaller replies, and no p~ on the page of rounds.")
    ] = False,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Talk to a verifier server by the device's driver: tokens coloured by who proposed them, MAT, every round."""
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.measure.chat import ChatOptions, chat_run

    options = ChatOptions(system, backend, max_new_tokens, seed, greedy, not without_evidence)
    connecting = connect_options(token_file, ca, insecure, None, False)
    raise typer.Exit(chat_run(server, only(path, recipe), run, target, options, connecting))
