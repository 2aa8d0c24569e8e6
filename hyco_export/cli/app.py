"""The command line: every command with its options, and where errors end as one line and an exit code.

Flags say where things are; what changes an artifact's bytes stands in the recipe. The functions here parse and call;
each imports the module that does its work when it is called, so that `--help` and refusals come at once.
"""

import sys
import traceback
from copy import copy
from pathlib import Path
from typing import Annotated

import typer

import hyco_export
from hyco_export.cli.arguments import (
    BackendOption,
    CaOption,
    DryRunOption,
    HubDeviceOption,
    InsecureOption,
    LinkOption,
    LinkWaitsOption,
    OwnServerOption,
    PerCategoryOption,
    PromptLimitOption,
    PromptSetOption,
    RebuildOption,
    RecipeArgument,
    RecipeOption,
    RunOption,
    ServerDeviceOption,
    ServerTokensOption,
    SystemsOption,
    TargetOption,
    TokenOption,
    TruncateOption,
    only,
    with_rule_options,
)
from hyco_export.cli.command_groups import dev, recipes, workbench
from hyco_export.cli.console import show_error
from hyco_export.cli.invocation import Invocation, is_main
from hyco_export.cli.measuring import measuring
from hyco_export.core.artifact import COMPILE
from hyco_export.core.files import storage_error
from hyco_export.core.numerics import BYTES_PER_MB
from hyco_export.errors import HycoError
from hyco_export.protocol.server_address import LOOPBACK, USUAL_PORT
from hyco_export.protocol.wire import LARGEST_STEP_BYTES
from hyco_export.stages.declarations import Stage
from hyco_export.stages.table import STAGES

app = typer.Typer(
    name="hyco-export",
    help="Make the phone's drafting artifacts of HyCo (arXiv 2610.21436) from three checkpoints, and prove them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(dev, name="dev")
app.add_typer(workbench)
app.add_typer(measuring)

FORMER_NAMES = ("bench-peers", "bench-counting", "train-tiny", "create-checkpoints")  # before there was `dev`
UNEXPECTED = 3  # a fault of this program: Python's own 1 would say that a gate failed
SHARED_COMMANDS = (*(stage.name for stage in STAGES), "run", "serve")  # of the processes of a launch together


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hyco-export {hyco_export.__version__}")
        raise typer.Exit


@app.callback()
def launched(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # of the processes of a launch only the main one does what they cannot do together
    if not is_main() and context.invoked_subcommand not in SHARED_COMMANDS:
        raise typer.Exit()


def _add_stage(stage: Stage) -> None:
    """The command that builds this stage; one whose artifact depends on the target takes `--target` too."""

    def build(
        path: RecipeArgument = None,
        recipe: RecipeOption = None,
        run: RunOption = None,
        rebuild: RebuildOption = False,
        dry_run: DryRunOption = False,
    ) -> None:
        _build_stage(stage.name, only(path, recipe), run, None, dry_run, rebuild)

    def build_for_target(
        path: RecipeArgument = None,
        recipe: RecipeOption = None,
        run: RunOption = None,
        target: TargetOption = None,
        rebuild: RebuildOption = False,
        dry_run: DryRunOption = False,
    ) -> None:
        _build_stage(stage.name, only(path, recipe), run, target, dry_run, rebuild)

    app.command(stage.name, help=stage.summary)(build_for_target if stage.per_target else build)


for stage in STAGES:
    if stage.name != COMPILE:
        _add_stage(stage)


@app.command(COMPILE)
def compile_(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    rebuild: RebuildOption = False,
    dry_run: DryRunOption = False,
    via: Annotated[str | None, typer.Option(help="aihub: compile there, into <run>/aihub.", show_default=False)] = None,
    device: HubDeviceOption = None,
    qairt: Annotated[
        str | None, typer.Option(help="QAIRT version for --via aihub. Default: the service's.", show_default=False)
    ] = None,
    qairt_wheel: Annotated[
        str | None,
        typer.Option(help="Another onnxruntime-qnn, e.g. 2.6.0, into <run>/qairt-VERSION.", show_default=False),
    ] = None,
) -> None:
    """Compile the graphs into Hexagon context binaries."""
    if (via or device or qairt or qairt_wheel) is None:
        _build_stage(COMPILE, only(path, recipe), run, target, dry_run, rebuild)
        return
    from hyco_export.cli.cloud import CompilerOptions, compile_with

    options = CompilerOptions(via, device, qairt, qairt_wheel)
    compile_with(options, only(path, recipe), run, target, dry_run)


@app.command()
def run(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    device: ServerDeviceOption = None,
    rebuild: RebuildOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Everything: build what is not fresh, start the server, validate against it, stop it."""
    from hyco_export.cli.run import run_everything

    raise typer.Exit(run_everything(only(path, recipe), run, target, device, dry_run, rebuild))


@app.command()
def serve(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = USUAL_PORT,
    device: ServerDeviceOption = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the verifier. Default: the recipe's.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Sessions in one pass of the model, at most.", min=1)] = 8,
    batch_wait_ms: Annotated[
        float, typer.Option(help="How long a pass waits for further sessions that may call.", min=0.0, max=1000.0)
    ] = 1.0,
    cache_mb: Annotated[
        int | None, typer.Option(help="K/V memory of all sessions. Default: half of what is free.", min=1)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of a session. Default: what the verifier was made for.", min=2)
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the layers at the first passes; for GPUs.")
    ] = False,
    no_row_times: Annotated[
        bool, typer.Option("--no-row-times", help="Do not measure at the start what passes take by their rows.")
    ] = False,
    sessions: Annotated[int | None, typer.Option(help="Sessions held at once. Default: 16.", min=1)] = None,
    idle_s: Annotated[
        float | None, typer.Option(help="Seconds until an uncalled session is forgotten. Default: 600.", min=0.1)
    ] = None,
    replicas: Annotated[int, typer.Option(help="Verifiers behind one address, by Ray Serve.", min=1)] = 1,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM). Default: plain HTTP.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    token_file: ServerTokensOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen off this machine without TLS or token.")] = False,
    pad_replies: Annotated[
        int, typer.Option(help="Pad replies to multiples of so many bytes; 0: not.", min=0, max=LARGEST_STEP_BYTES)
    ] = 0,
) -> None:
    """Serve the verifier over HTTP (hyco_export/protocol/PROTOCOL.md)."""
    from hyco_export.cli.serve import ListenOptions, serve_run
    from hyco_export.server.admission import Batching, ServeOptions

    cache_bytes = cache_mb * BYTES_PER_MB if cache_mb is not None else None
    batching = Batching(batch, batch_wait_ms)
    options = ServeOptions(sessions, batching, cache_bytes, context, idle_s, compiled, row_times=not no_row_times)
    listen = ListenOptions(host.strip("[]"), port, tls_cert, tls_key, token_file, insecure, pad_replies)
    serve_run(only(path, recipe), run, listen, device, threads, options, replicas)


@app.command()
def validate(
    server: Annotated[str, typer.Option("--server", help="URL of a running `hyco-export serve`.")],
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
    link: LinkOption = None,
    link_waits: LinkWaitsOption = False,
    traces: Annotated[
        Path | None, typer.Option("--traces", help="Folder for the sampled rounds with p~, one JSONL a system.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for report, lock and traces. Default: <run>/validate, without traces."),
    ] = None,
) -> None:
    """Drive a server and say pass or fail. Exit 0 pass, 1 a gate failed, 2 could not run, 3 our own fault."""
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.validation import validate_run

    connecting = connect_options(token_file, ca, insecure, link, link_waits)
    raise typer.Exit(validate_run(server, only(path, recipe), run, target, connecting, traces, out))


@app.command()
@with_rule_options
def replay(
    trace: Annotated[
        list[Path], typer.Argument(help="JSONL files of one system: of validate --traces, bench --traces or evaluate.")
    ],
    rule: Annotated[str | None, typer.Option(help="Acceptance rule. Default: all of them.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="For the epsilon rules; may be repeated. Default: 0.005.")
    ] = None,
    stop_needs_draw: Annotated[bool, typer.Option("--stop-needs-draw", help="No stop by a threshold alone.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the table there.")] = None,
    **options: float | None,
) -> None:
    """Judge logged trees by other acceptance rules, offline, each round on its own."""
    from hyco_export.cli.validation import replay_traces

    given = {name: value for name, value in options.items() if value is not None}
    replay_traces(trace, rule, epsilon or [], stop_needs_draw, given, json_path)


@app.command()
def bench(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    server: OwnServerOption = None,
    systems: SystemsOption = "cloud-mtp,hyco-exact,hyco",
    device: ServerDeviceOption = None,
    backend: BackendOption = "onnx-cpu",
    prompts: PromptSetOption = None,
    per_category: PerCategoryOption = None,
    limit: PromptLimitOption = None,
    truncate: TruncateOption = None,
    seeds: Annotated[int, typer.Option(help="Answers to every prompt, each drawn with a seed of its own.", min=1)] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(help="Default: the recipe's.", min=2)] = None,
    out: Annotated[Path | None, typer.Option(help="Traces go here. Default: <run>/bench.")] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Keep p~ in the traces, so that replay takes them.")] = False,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
    link: LinkOption = None,
    link_waits: LinkWaitsOption = False,
) -> None:
    """Compare systems over prompts and seeds, interleaved; a run that was stopped goes on."""
    from hyco_export.cli.bench import BenchOptions, bench_run, split_names
    from hyco_export.cli.connection import connect_options
    from hyco_export.cli.measure.set_options import SetOptions

    asked = SetOptions(prompts, per_category, limit, truncate)
    options = BenchOptions(split_names(systems), backend, asked.count, seeds, max_new_tokens, out, asked, traces)
    connecting = connect_options(token_file, ca, insecure, link, link_waits)
    bench_run(server, only(path, recipe), run, target, options, connecting, device)


@app.command()
def bundle(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the bundle.")] = Path("bundle"),
) -> None:
    """Write one folder for an app team: binaries, tables, specification, golden vectors, a consumer."""
    from hyco_export.cli.bundle import bundle_run

    bundle_run(only(path, recipe), run, target, out)


@app.command()
def compare(
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.")],
    outputs: Annotated[Path, typer.Argument(help="Folder with a device's outputs: raw files or npz.")],
) -> None:
    """Say per tensor whether a device's outputs are equal, within or outside, and why. Exit 1: outside."""
    from hyco_export.cli.bundle import compare_outputs

    raise typer.Exit(compare_outputs(bundle, outputs))


@app.command()
def targets() -> None:
    """List the NPU targets."""
    from hyco_export.cli.build import list_targets

    list_targets()


def _build_stage(
    name: str, recipe: Path | None, run: Path | None, target: str | None, dry_run: bool, rebuild: bool
) -> None:
    from hyco_export.cli.build import build_stage

    build_stage(name, recipe, run, target, dry_run, rebuild)


for command in dev.registered_commands:
    if command.name in FORMER_NAMES:
        app.registered_commands.append(copy(command))
        app.registered_commands[-1].hidden = True
for group in (app, dev, workbench, recipes, measuring):
    for command in group.registered_commands:
        command.cls = Invocation


def main() -> None:
    """Entry point: what a user can act on ends here as one line, a next step and an exit code.

    An error that nobody foresaw keeps its traceback and ends with code 3: 1 says that a gate failed.
    """
    try:
        _run_app()
    except HycoError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.stderr.write("this is a fault of hyco-export: please report it with the lines above\n")
        sys.exit(UNEXPECTED)


def _run_app() -> None:
    """Raises HycoError, also for what the operating system refused anywhere below."""
    try:
        app()
    except Exception as error:
        refused = storage_error(error)
        if refused is None:
            raise
        raise refused from error
