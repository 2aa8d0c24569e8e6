"""What the commands do: open the run, call the stage runner, the server or the validation, print the outcome."""

import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.console import ConsoleProgress, output, problems, show_forecast, show_metrics, show_rows
from hyco_export.cli.launch import is_main
from hyco_export.cli.server_process import server_process
from hyco_export.core.recipe import Validation, embedded_recipe, load_recipe
from hyco_export.core.recipe_rules import check_recipe
from hyco_export.core.targets import find_target
from hyco_export.errors import ArtifactError, HycoError, RecipeError, ServerError
from hyco_export.runtime.systems import find_system
from hyco_export.stages.forecast import forecast
from hyco_export.stages.plan import chain_to, require_current
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.stage import Stage
from hyco_export.stages.table import require_stage, stages_of
from hyco_export.stages.threads import use_threads

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from hyco_export.evaluate.meeting import Subject
    from hyco_export.runtime.engine import Engine
    from hyco_export.runtime.ports import Transport
    from hyco_export.runtime.serve_options import ServeOptions
    from hyco_export.runtime.wire import ServerInfo

PERCENT = 100
RESPELLED = "respelled"  # not a scale: the embedded family with an SLM of another vocabulary
NEXT_COMMAND = {
    "capture": "hyco-export qat-head",
    "qat-head": "hyco-export build-keepset",
    "build-keepset": "hyco-export convert-head",
    "convert-head": "hyco-export convert-slm",
    "convert-slm": "hyco-export compile",
    "compile": "hyco-export serve, then hyco-export validate --server URL",
}
NEXT_SLM_COMMAND = {
    "capture": "hyco-export build-keepset",
    "build-keepset": "hyco-export convert-slm",
    "convert-slm": "hyco-export compile",
}


def open_run(recipe_path: Path | None, run_dir: Path | None, target: str | None = None) -> RunFolder:
    """The run folder of a recipe; says so when it is the embedded one.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    if recipe_path is None:
        output.print("recipe: the embedded tiny family (give --recipe for another)", highlight=False)
    recipe = load_recipe(recipe_path or embedded_recipe())
    if target is not None:
        recipe = msgspec.structs.replace(recipe, target=find_target(target).name)
        check_recipe(recipe)
    require_known_systems(recipe.validation)
    folder = recipe_path.resolve().parent if recipe_path else None
    return RunFolder(run_dir or Path("runs") / recipe.name, recipe, folder)


def require_known_systems(plan: Validation) -> None:
    """Before anything is built.

    Raises:
        RecipeError: a name that is no system, a baseline without server time, or a text that nobody verifies.
    """
    for field, names in (("systems", plan.systems), ("greedy_systems", plan.greedy_systems)):
        for name in names:
            try:
                system = find_system(name)
            except HycoError as error:
                raise RecipeError(f"$.validation.{field}: {error.message}", error.hint) from error
            if field == "greedy_systems" and not system.verifies_all:
                raise RecipeError(
                    f"$.validation.{field}: {name} keeps tokens unverified, its text need not be plain decoding's",
                    "take it out",
                )
    if not find_system(plan.systems[0]).asks:
        raise RecipeError(
            f"$.validation.systems: {plan.systems[0]} asks no server, the others cannot be compared with it",
            "put another system first",
        )


def build_stage(name: str, recipe_path: Path | None, run_dir: Path | None, target: str | None, dry_run: bool) -> None:
    """Build one stage and whatever it needs that is not fresh; print its metrics and the next command."""
    run = open_run(recipe_path, run_dir, target)
    require_stage(run.recipe, name)
    chain = chain_to(stages_of(run.recipe), name)
    if dry_run:
        show_forecast(forecast(run, chain))
        return
    _build(run, chain)
    follow = NEXT_SLM_COMMAND if run.recipe.models.head is None else NEXT_COMMAND
    if name not in follow:
        return
    flags = "".join(f" {flag} {value}" for flag, value in (("--recipe", recipe_path), ("--run", run_dir)) if value)
    output.print(f"\nnext: {follow[name]}{flags}", highlight=False, soft_wrap=True)


def _build(run: RunFolder, chain: Sequence[Stage]) -> None:
    with ConsoleProgress() as progress:
        manifests = build_all(run, chain, progress)
    if not manifests:  # a helper of the main process
        raise SystemExit(0)
    last = chain[-1]
    show_metrics(f"\n{last.name} -> {run.folder(last)}", manifests[last.name].metrics)


def run_everything(recipe_path: Path | None, run_dir: Path | None, target: str | None, dry_run: bool) -> int:
    """The whole chain, then serve and validate; the exit code of the validation."""
    run = open_run(recipe_path, run_dir, target)
    if dry_run:
        show_forecast(forecast(run, stages_of(run.recipe)))
        return 0
    if run.recipe.models.head is None:
        _build(run, stages_of(run.recipe))
        output.print("\nno head in the recipe: nothing to serve or to validate", highlight=False)
        return 0
    with run.lock() if is_main() else nullcontext():  # nobody builds what is being validated
        _build(run, stages_of(run.recipe))
        with server_process(recipe_path, run.root) as url:
            return validate_in(run, url, reach_of(None, None, False, None, False))


class Door(msgspec.Struct, frozen=True):
    """Where `serve` listens, and whom it lets in."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    token_file: Path | None
    insecure: bool
    pad_bytes: int  # replies are padded to multiples of it; 0: not


def serve_run(
    recipe_path: Path | None,
    run_dir: Path | None,
    door: Door,
    device: str,
    threads: int | None,
    options: "ServeOptions",
    replicas: int,
) -> None:
    """Serve until interrupted; the first line on stdout that holds a URL means ready."""
    from hyco_export.runtime.guard.tls import check_exposure, server_context
    from hyco_export.runtime.guard.tokens import Tokens, read_tokens

    if (door.certificate is None) != (door.key is None):
        raise ServerError("--tls-cert and --tls-key belong together", "give both")
    tls = server_context(door.certificate, door.key) if door.certificate and door.key else None
    tokens = read_tokens(door.token_file)
    check_exposure(door.host, tls is not None, bool(tokens), door.insecure)
    port = require_free_port(door.host, door.port)  # a taken one is said before models are loaded
    run = open_run(recipe_path, run_dir)

    def build() -> "Starlette":
        from hyco_export.runtime.assembly import open_server_engine
        from hyco_export.runtime.server import create_app

        use_threads(threads or run.recipe.threads)
        engine, info = open_server_engine(run.recipe, run.root, device, run.recipe_folder, options)
        if info.head_digest:
            _self_test(run.root, engine, info)
        return create_app(engine, info, Tokens(tokens), pad_bytes=door.pad_bytes)

    def ready(host: str, port: int) -> None:
        output.print(f"serving on {'https' if tls else 'http'}://{host}:{port} (stop with Ctrl-C)", highlight=False)

    if replicas > 1:
        from hyco_export.runtime.replicas import serve_replicas

        serve_replicas(build, replicas, door.host, port, ready, door.certificate, door.key)
        return
    from hyco_export.runtime.serving import serve

    serve(build(), host=door.host, port=door.port, on_ready=ready, tls=tls)


def _self_test(root: Path, engine: "Engine", info: "ServerInfo") -> None:
    """Say what is wrong with the server's hand-offs; it serves all the same, for its own text is right."""
    from hyco_export.evaluate.diagnose import diagnose_server
    from hyco_export.runtime.transport import LocalTransport

    try:
        found = diagnose_server(root, LocalTransport(engine, info), info)
    except ArtifactError as error:  # a folder with the head alone
        problems.print(f"self-test: left out, {error.message}", highlight=False, markup=False, soft_wrap=True)
        return
    for finding in found.findings:
        problems.print(f"self-test: {finding}", highlight=False, markup=False, soft_wrap=True)
    if not found.findings:
        output.print(f"self-test: hand-offs are right at {found.positions} golden positions", highlight=False)


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ServerError: another program listens there, or the address is not this machine's.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            "choose another --host or --port; --port 0 takes a free one",
        ) from error


class Reach(msgspec.Struct, frozen=True):
    """How a server is reached: what it is shown, how it is known, and the link that is counted on the way."""

    token: str = ""
    authority: Path | None = None
    insecure: bool = False
    link: str | None = None
    link_waits: bool = False


def reach_of(
    token_file: Path | None, authority: Path | None, insecure: bool, link: str | None, link_waits: bool
) -> Reach:
    """What the command line says, with the token in it.

    Raises:
        ServerError: the token file cannot be used, or holds more than the one token that a client has.
    """
    from hyco_export.runtime.guard.tokens import read_tokens

    tokens = read_tokens(token_file)
    if len(tokens) > 1:
        raise ServerError(f"{token_file} holds {len(tokens)} tokens, a client shows one", "give a file with one")
    return Reach(tokens[0] if tokens else "", authority, insecure, link, link_waits)


def transport_to(url: str, reach: Reach, seed: int) -> tuple["Transport", Callable[[], float]]:
    """Calls to the server at `url`, and the clock that measures them.

    Raises:
        HycoError: no such link, a URL or file that cannot be used, or nobody answers.
    """
    from hyco_export.runtime.link.presets import over_link
    from hyco_export.runtime.transport import Access, HttpTransport

    direct = HttpTransport(url, access=Access(reach.token, reach.authority, reach.insecure))
    transport, clock = over_link(direct, reach.link, seed, reach.link_waits)
    direct.info()  # a dead URL is said at once, before any file is hashed
    return transport, clock


def validate_run(
    server: str,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    reach: Reach,
    traces: Path | None,
) -> int:
    """Validate the artifacts of a run against a server that somebody started."""
    return validate_in(open_run(recipe_path, run_dir, target), server, reach, traces)


def validate_in(run: RunFolder, url: str, reach: Reach, traces: Path | None = None) -> int:
    """Validate, print the summary, write the report; 0 when every gate holds, 1 when one does not.

    Raises:
        ArtifactError: another process works in the run folder.
        StorageError: it cannot be written: said before the validation, for its report would be lost.
    """
    with run.lock() if run.root.is_dir() else nullcontext():  # a missing folder is refused, not made
        return _validate(run, url, reach, traces)


def _validate(run: RunFolder, url: str, reach: Reach, traces: Path | None) -> int:
    run.recipe.models.require_head()
    transport, clock = transport_to(url, reach, run.recipe.validation.seed)
    subject = subject_of(run)

    from hyco_export.evaluate.report import write_report  # heavy: after what is said at once
    from hyco_export.evaluate.summary import summary
    from hyco_export.evaluate.validate import REPORT_FOLDER, validate

    with ConsoleProgress() as progress:
        report = validate(subject, url, progress.step, traces, transport, clock)
    output.print(summary(report), highlight=False)
    _, page = write_report(report, run.root / REPORT_FOLDER)
    output.print(f"report: {page}", highlight=False, soft_wrap=True)
    return 0 if report.verdict == "pass" else 1


def subject_of(run: RunFolder) -> "Subject":
    """What is driven against a server, once every stage is current.

    Raises:
        ArtifactError: an artifact is missing, altered, or of another recipe; said before anything heavy is imported.
    """
    from hyco_export.evaluate.meeting import Subject
    from hyco_export.evaluate.run_artifacts import Checkpoints, open_artifacts

    head = run.recipe.models.require_head()
    require_current(run, stages_of(run.recipe))
    artifacts = open_artifacts(run.root, run.recipe.target)
    use_threads(run.recipe.threads)
    return Subject(
        root=run.root,
        recipe=run.recipe,
        artifacts=artifacts,
        checkpoints=Checkpoints(
            run.source("verifier", run.recipe.models.verifier),
            run.source("head", head),
            run.source("slm", run.recipe.models.slm),
        ),
        prompts=run.source("validation", run.recipe.data.validation),
    )


def replay_traces(
    paths: Sequence[Path],
    rule: str | None,
    epsilons: Sequence[float],
    stop_needs_draw: bool,
    options: dict[str, float],
    json_path: Path | None,
) -> None:
    """Print what each rule would have committed on the logged trees."""
    from hyco_export.core.json_file import write_json
    from hyco_export.evaluate.replay import chosen_settings, replay
    from hyco_export.evaluate.trace_files import read_traces

    settings = chosen_settings(rule, epsilons, stop_needs_draw, options)
    traces = [trace for path in paths for trace in read_traces(path)]
    rows = [replay(traces, one) for one in settings]
    table = {
        row.label: {
            "MAT": row.mat,
            **row.tokens_by_rule,
            "stops": row.threshold_stops,
            "differ": row.differing,
        }
        for row in rows
    }
    recorded = sorted({trace.acceptance.rule for trace in traces})
    show_rows(f"{rows[0].rounds} rounds, recorded with {', '.join(recorded)}; each judged on its own", table)
    output.print("stops: by the threshold alone; differ: rounds that commit other tokens than recorded", style="dim")
    if json_path is not None:
        write_json(json_path, rows)


def inspect_path(path: Path) -> None:
    """Print a manifest (files checked) or the facts of a context binary.

    Raises:
        HycoError: neither is there, or it is not what its manifest names.
    """
    if not path.exists():
        raise HycoError(f"{path} does not exist", "give an artifact folder, or a context binary (.bin) in one")
    if path.is_dir():
        from hyco_export.core.artifact import verify

        _require_artifact(path)
        manifest = verify(path)
        show_metrics(f"{manifest.stage} (every file has its recorded sha256)", msgspec.to_builtins(manifest.metrics))
        show_metrics(
            "\nfiles", {name: f"{record.size_bytes:,} B  {record.sha256}" for name, record in manifest.files.items()}
        )
        show_metrics("\nmade with", {"key": manifest.key, **manifest.versions})
    elif path.suffix == ".bin":
        _require_built(path)
        from hyco_export.graph.context_binary import read_context
        from hyco_export.graph.context_check import require_sound

        info = read_context(path)
        output.print_json(msgspec.json.encode(info).decode())
        require_sound(info, path.name)
    else:
        raise HycoError(f"{path} is neither an artifact folder nor a context binary (.bin)", "give one of these")


def _require_built(file: Path) -> None:
    """Raises ArtifactError: the manifest beside the file, where there is one, names another content."""
    from hyco_export.core.artifact import MANIFEST_NAME, read_manifest, verify_file

    if (file.parent / MANIFEST_NAME).is_file():
        verify_file(file.parent, file.name, read_manifest(file.parent))
    else:
        problems.print(f"no {MANIFEST_NAME} beside {file.name}: nothing to compare its bytes with", highlight=False)


def _require_artifact(folder: Path) -> None:
    """Tell a run folder and a foreign folder from an artifact.

    Raises:
        ArtifactError: the folder is one of these; the hint names what can be inspected.
    """
    from hyco_export.core.artifact import MANIFEST_NAME

    if (folder / MANIFEST_NAME).is_file():
        return
    artifacts = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if artifacts:
        names = ", ".join(path.name for path in artifacts)
        raise ArtifactError(
            f"{folder} is a run folder with {len(artifacts)} artifacts: {names}",
            f"inspect one of them: hyco-export inspect {artifacts[0]}",
        )
    raise ArtifactError(
        f"{folder} is no artifact (no {MANIFEST_NAME})", "give a folder that a stage built, such as runs/tiny/capture"
    )


def measure_counting(
    recipe_path: Path | None, run_dir: Path | None, tokenizer_dir: Path | None, created: int | None
) -> None:
    """Print the speed of counting beside the tokenizer's own, over the recipe's conversations or created ones."""
    from tempfile import TemporaryDirectory

    from hyco_export.evaluate.counting_bench import bench_counting, write_created
    from hyco_export.nn.tokenizer_file import open_tokenizer

    run = open_run(recipe_path, run_dir)
    backend = open_tokenizer(tokenizer_dir or run.source("verifier", run.recipe.models.verifier)).backend
    with ConsoleProgress() as progress, TemporaryDirectory() as folder:
        if created is None:
            path = run.source("conversations", run.recipe.data.conversations)
        else:
            path = Path(folder) / "created"
            write_created(path, backend, created, progress.step)
        result = bench_counting(path, backend, progress.step)
    show_metrics("\ncounting against the tokenizer's own encode_batch", result.summary)


def list_targets() -> None:
    """Print the target table: the vendor's numbers, and the bits of weights and activations that compile."""
    from hyco_export.core.targets import TARGETS

    rows = {
        target.name: {
            "chip": target.marketing_name,
            "SoC": f"{target.soc} ({target.soc_model})",
            "NPU": f"v{target.htp_arch}, {target.vtcm_mb} MB",
            "W bits": "/".join(map(str, target.weight_bits)),
            "A bits": "/".join(map(str, target.activation_bits)),
        }
        for target in TARGETS.values()
    }
    show_rows("targets", rows)


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
    from hyco_export.nn.tiny.family import DEFAULT_SEED, train_family

    with ConsoleProgress() as progress:
        train_family(
            out,
            seed=DEFAULT_SEED,
            quick=quick,
            on_progress=lambda label, share: progress.step(label, round(PERCENT * share), PERCENT),
        )
    output.print((out / "MODEL_CARD.md").read_text(encoding="utf-8"), markup=False, highlight=False)


def create_checkpoint_family(out: Path, scale_name: str, tokenizer: Path | None) -> None:
    """Write created checkpoints into a new folder; print the command that runs them."""
    require_new(out)
    if scale_name == RESPELLED:
        from hyco_export.nn.created.respelled import create_respelled

        show_next(create_respelled(out))
        return
    from hyco_export.nn.created.family import DEFAULT_SEED, RECIPE_FILE, create_family
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
    show_next(out / RECIPE_FILE)


def show_next(recipe: Path) -> None:
    """The command that runs a recipe."""
    output.print(f"next: hyco-export run {recipe}", highlight=False, soft_wrap=True)
