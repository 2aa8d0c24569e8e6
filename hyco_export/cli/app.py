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
from hyco_export.cli.invocation import Invocation, is_main
from hyco_export.errors import HycoError
from hyco_export.protocol.server_address import LOOPBACK, USUAL_PORT
from hyco_export.protocol.wire import LARGEST_STEP_BYTES

app = typer.Typer(
    name="hyco-export",
    help="Make the phone's drafting artifacts of HyCo (arXiv 2610.21436) from three checkpoints, and prove them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

dev = typer.Typer(
    help="For work on this program: train the embedded family, create checkpoints, compare speeds.",
    no_args_is_help=True,
)
app.add_typer(dev, name="dev")

recipes = typer.Typer(help="List the recipes that ship, or print one.", invoke_without_command=True)
app.add_typer(recipes, name="recipes")

RECIPE_HELP = "Recipe (YAML), or the name of one that ships. Default: the embedded tiny family."
RecipeArgument = Annotated[Path | None, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, show_default=False)]
RecipeOption = Annotated[Path | None, typer.Option("--recipe", help="The same, as an option.", show_default=False)]
UNEXPECTED = 3  # a fault of this program: Python's own 1 would say that a gate failed
SHARED_COMMANDS = ("capture", "qat-head", "build-keepset", "convert-head", "convert-slm", "compile", "run", "serve")
RunOption = Annotated[Path | None, typer.Option("--run", help="Where artifacts live. Default: runs/<recipe name>.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="NPU target, e.g. sm8850. Default: the recipe's.")]
ServerTokensOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File of bearer tokens, one a line. Default: the one in HYCO_TOKEN, or none."),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the bearer token. Default: the one in HYCO_TOKEN, or none."),
]
CaOption = Annotated[Path | None, typer.Option("--ca", help="Authority of the server's certificate (PEM).")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Send the token without TLS.")]
LinkOption = Annotated[str | None, typer.Option("--link", help="Count times as over lte, 5g-nsa or wifi.")]
LinkWaitsOption = Annotated[
    bool, typer.Option("--link-waits", help="Sleep what the link takes; specedge-pd drafts meanwhile.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Device of AI Hub. Default: Samsung Galaxy S26 Ultra.", show_default=False),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and build nothing.")]


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


@app.command()
def capture(
    path: RecipeArgument = None, recipe: RecipeOption = None, run: RunOption = None, dry_run: DryRunOption = False
) -> None:
    """Record the verifier's greedy answers and the hand-offs the head reads."""
    _run_stage("capture", _only(path, recipe), run, None, dry_run)


@app.command("qat-head")
def qat_head(
    path: RecipeArgument = None, recipe: RecipeOption = None, run: RunOption = None, dry_run: DryRunOption = False
) -> None:
    """Train the MTP head's 4-bit weights by KL from the original head."""
    _run_stage("qat-head", _only(path, recipe), run, None, dry_run)


@app.command("build-keepset")
def build_keepset(
    path: RecipeArgument = None, recipe: RecipeOption = None, run: RunOption = None, dry_run: DryRunOption = False
) -> None:
    """Choose the token ids both drafters may propose, and their 8-bit embedding table."""
    _run_stage("build-keepset", _only(path, recipe), run, None, dry_run)


@app.command("convert-head")
def convert_head(
    path: RecipeArgument = None, recipe: RecipeOption = None, run: RunOption = None, dry_run: DryRunOption = False
) -> None:
    """Write the head's K steps as one integer graph."""
    _run_stage("convert-head", _only(path, recipe), run, None, dry_run)


@app.command("convert-slm")
def convert_slm(
    path: RecipeArgument = None, recipe: RecipeOption = None, run: RunOption = None, dry_run: DryRunOption = False
) -> None:
    """Turn the SLM into static integer graphs over K/V rings."""
    _run_stage("convert-slm", _only(path, recipe), run, None, dry_run)


@app.command("compile")
def compile_(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    dry_run: DryRunOption = False,
    via: Annotated[str | None, typer.Option(help="aihub: compile there, into <run>/aihub.", show_default=False)] = None,
    device: DeviceOption = None,
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
        _run_stage("compile", _only(path, recipe), run, target, dry_run)
        return
    from hyco_export.cli.cloud import CompilerOptions, compile_with

    options = CompilerOptions(via, device, qairt, qairt_wheel)
    compile_with(options, _only(path, recipe), run, target, dry_run)


@app.command()
def profile(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    device: DeviceOption = None,
    feeds: Annotated[int, typer.Option(help="Sample inputs of each graph to run there.", min=1, max=24)] = 4,
    artifact: Annotated[
        Path | None, typer.Option(help="Compiled artifact. Default: the run's.", show_default=False)
    ] = None,
    devices: Annotated[bool, typer.Option("--list-devices", help="List AI Hub's devices and end.")] = False,
) -> None:
    """Run the compiled graphs on a phone of AI Hub: outputs compared, NPU times for bench. Exit 1: outputs differ."""
    from hyco_export.cli.cloud import list_devices, profile_run

    if devices:
        list_devices()
        return
    raise typer.Exit(profile_run(_only(path, recipe), run, target, device, feeds, artifact))


@app.command()
def run(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Everything: build what is not fresh, start the server, validate against it, stop it."""
    from hyco_export.cli.build import run_everything

    raise typer.Exit(run_everything(_only(path, recipe), run, target, dry_run))


@app.command()
def serve(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = USUAL_PORT,
    device: Annotated[str, typer.Option(help="Where the verifier runs: cpu, cuda, cuda:1.")] = "cpu",
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
    from hyco_export.core.numerics import BYTES_PER_MB
    from hyco_export.server.admission import ServeOptions
    from hyco_export.server.scheduler import Batching

    cache_bytes = cache_mb * BYTES_PER_MB if cache_mb is not None else None
    options = ServeOptions(sessions, Batching(batch, batch_wait_ms), cache_bytes, context, idle_s, compiled)
    listen = ListenOptions(host.strip("[]"), port, tls_cert, tls_key, token_file, insecure, pad_replies)
    serve_run(_only(path, recipe), run, listen, device, threads, options, replicas)


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
) -> None:
    """Drive a server and say pass or fail. Exit 0 pass, 1 a gate failed, 2 could not run, 3 our own fault."""
    from hyco_export.cli.options import reach_of
    from hyco_export.cli.validation import validate_run

    reach = reach_of(token_file, ca, insecure, link, link_waits)
    raise typer.Exit(validate_run(server, _only(path, recipe), run, target, reach, traces))


@app.command()
def replay(
    trace: Annotated[list[Path], typer.Argument(help="JSONL files of one system, from `validate --traces`.")],
    rule: Annotated[str | None, typer.Option(help="Acceptance rule. Default: all of them.")] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="For the epsilon rules; may be repeated. Default: 0.005.")
    ] = None,
    stop_needs_draw: Annotated[bool, typer.Option("--stop-needs-draw", help="No stop by a threshold alone.")] = False,
    posterior_threshold: Annotated[float | None, typer.Option(help="For `typical`. Default: 0.09.")] = None,
    posterior_alpha: Annotated[float | None, typer.Option(help="For `typical`. Default: 0.3.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the table there.")] = None,
) -> None:
    """Judge logged trees by other acceptance rules, offline, each round on its own."""
    from hyco_export.cli.validation import replay_traces

    options = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
    given = {name: value for name, value in options.items() if value is not None}
    replay_traces(trace, rule, epsilon or [], stop_needs_draw, given, json_path)


@app.command()
def bench(
    path: RecipeArgument = None,
    recipe: RecipeOption = None,
    run: RunOption = None,
    target: TargetOption = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a running server. Default: one of its own.", show_default=False)
    ] = None,
    systems: Annotated[str, typer.Option(help="Names, the baseline first.")] = "cloud-mtp,hyco-exact,hyco",
    backend: Annotated[str, typer.Option(help="Device back end: torch, onnx-cpu, qnn.")] = "onnx-cpu",
    prompts: Annotated[int | None, typer.Option(help="Default: the recipe's validation.prompts.", min=1)] = None,
    seeds: Annotated[int, typer.Option(help="Answers to every prompt, each drawn with a seed of its own.", min=1)] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(help="Default: the recipe's.", min=2)] = None,
    out: Annotated[Path | None, typer.Option(help="Traces go here. Default: <run>/bench.")] = None,
    token_file: TokenOption = None,
    ca: CaOption = None,
    insecure: InsecureOption = False,
    link: LinkOption = None,
    link_waits: LinkWaitsOption = False,
) -> None:
    """Compare systems over prompts and seeds, interleaved; a run that was stopped goes on."""
    from hyco_export.cli.bench import BenchOptions, bench_run, split_names
    from hyco_export.cli.options import reach_of

    options = BenchOptions(split_names(systems), backend, prompts, seeds, max_new_tokens, out)
    reach = reach_of(token_file, ca, insecure, link, link_waits)
    bench_run(server, _only(path, recipe), run, target, options, reach)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact folder, a bundle, or a file: ONNX, .bin, safetensors, ...")],
    other: Annotated[
        Path | None, typer.Argument(help="A second one: show how they differ.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
) -> None:
    """Show an artifact's manifest, checked file by file, what a file says of itself, or how two differ (exit 1)."""
    from hyco_export.cli.inspection import inspect_path

    raise typer.Exit(inspect_path(path, other, as_json))


@app.command()
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
    from hyco_export.cli.bisection import BisectOptions, run_bisect

    options = BisectOptions(graph, reference, candidate, feeds, tensors, out, probe)
    raise typer.Exit(run_bisect(_only(path, recipe), run, target, options))


@app.command()
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
    from hyco_export.cli.doctor import run_doctor
    from hyco_export.cli.options import reach_of

    reach = reach_of(token_file, ca, insecure, None, False)
    raise typer.Exit(run_doctor(_only(path, recipe), run, server, reach, as_json))


@app.command()
def targets() -> None:
    """List the NPU targets."""
    from hyco_export.cli.build import list_targets

    list_targets()


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the recipes that ship, or print one."""
    from hyco_export.cli.recipes import list_recipes

    if context.invoked_subcommand is None:
        list_recipes()


@recipes.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="Name of a recipe that ships.")]) -> None:
    """Print a recipe's file, to begin your own with."""
    from hyco_export.cli.recipes import print_recipe

    print_recipe(name)


@app.command()
def explain(text: Annotated[str, typer.Argument(help="An error text or code of the NPU's libraries.")]) -> None:
    """Say cause and cure of a vendor's error, such as one from a phone's log. Exit 1: it is not known."""
    from hyco_export.cli.explain import explain_text

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
    from hyco_export.cli.dev import bench_peers

    raise typer.Exit(bench_peers(_only(path, recipe), run, prompts, max_new_tokens, vllm_python))


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
    from hyco_export.cli.dev import measure_counting

    measure_counting(_only(path, recipe), run, tokenizer, created)


@dev.command("train-tiny")
def train_tiny(
    out: Annotated[Path, typer.Argument(help="New folder for the three checkpoints.")],
    quick: Annotated[bool, typer.Option(help="A handful of steps: right shapes, no skill.")] = False,
) -> None:
    """Train the embedded family again from the text on this machine."""
    from hyco_export.cli.dev import train_tiny_family

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
    from hyco_export.cli.dev import create_checkpoint_family

    create_checkpoint_family(out, scale, tokenizer)


def _only(path: Path | None, option: Path | None) -> Path | None:
    """The recipe, whichever way it was given.

    Raises:
        HycoError: both ways.
    """
    if path is not None and option is not None:
        raise HycoError(f"two recipes: {path} and --recipe {option}", "give one")
    return path or option


def _run_stage(name: str, recipe: Path | None, run: Path | None, target: str | None, dry_run: bool) -> None:
    from hyco_export.cli.build import build_stage

    build_stage(name, recipe, run, target, dry_run)


for command in dev.registered_commands:  # their names of before they had a group of their own
    app.registered_commands.append(copy(command))
    app.registered_commands[-1].hidden = True
for command in (*app.registered_commands, *dev.registered_commands, *recipes.registered_commands):
    command.cls = Invocation


def main() -> None:
    """Entry point: what a user can act on ends here as one line, a next step and an exit code.

    An error that nobody foresaw keeps its traceback and ends with code 3: 1 says that a gate failed.
    """
    try:
        _run_app()
    except HycoError as error:
        from hyco_export.cli.console import show_error

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
        from hyco_export.core.files import storage_error

        refused = storage_error(error)
        if refused is None:
            raise
        raise refused from error
