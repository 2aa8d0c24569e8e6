"""What `profile` and `compile` with another compiler do: open the run, call AI Hub or another wheel, print results."""

import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from hyco_export.cli.build import show_plan
from hyco_export.cli.console import ConsoleProgress, format_bytes, output, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.cli.options import open_run, require_built
from hyco_export.cloud.client import HubClient, hub_errors, open_client
from hyco_export.cloud.compiling import compile_graph
from hyco_export.cloud.jobs import DEFAULT_DEVICE, SOC_ATTRIBUTE, find_device
from hyco_export.cloud.profile import profile_graph
from hyco_export.core.artifact import COMPILE, artifact_name, verify
from hyco_export.core.device_profile import PROFILE_FILE, DeviceProfile, graphs_key, write_profile
from hyco_export.core.golden import read_samples
from hyco_export.core.targets import TARGETS, Target, find_target
from hyco_export.errors import HycoError
from hyco_export.graph.parity import ParityLimits
from hyco_export.graph.qairt_wheel import qairt_version, wheel_folder
from hyco_export.stages.compile_elsewhere import (
    Compile,
    Compiled,
    Compiler,
    GraphToCompile,
    compile_elsewhere,
    graphs_of,
    with_wheel,
)
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import chain_to, stages_of

AIHUB = "aihub"
OUTPUTS_FOLDER = "profile"
Open = Callable[[], HubClient]


class CompilerOptions(msgspec.Struct, frozen=True):
    """What the command line says of another compiler; all None: the installed one."""

    via: str | None = None
    device: str | None = None
    qairt: str | None = None
    wheel: str | None = None

    def require_possible(self) -> None:
        """Raises HycoError: options that do not go together, before anything is built."""
        if self.via not in (None, AIHUB):
            raise HycoError(f"--via {self.via!r} is no compiler", "give aihub, or leave it out")
        if self.via and self.wheel:
            raise HycoError("--via and --qairt-wheel are two compilers", "give one of them")
        for name, value in (("--device", self.device), ("--qairt", self.qairt)):
            if value and not self.via:
                raise HycoError(f"{name} is AI Hub's", f"give it with --via {AIHUB}")


def compile_with(
    options: CompilerOptions,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    dry_run: bool,
    open_client: Open = open_client,
) -> None:
    """Build the run's integer graphs where they are not fresh, then compile them into an artifact of their own.

    Raises:
        HycoError: the compiler cannot be had, or refuses a graph.
    """
    options.require_possible()
    run = open_run(recipe_path, run_dir, target)
    chain = chain_to(stages_of(run.recipe), COMPILE)[:-1]
    if dry_run:
        show_plan(run, chain, COMPILE)
        return
    compiler, compile_one = _compiler(options, run, open_client)  # before hours of work: no login, no such version
    with ConsoleProgress() as progress:
        build_all(run, chain, progress)
        with run.lock():
            folder = compile_elsewhere(run, compiler, compile_one, progress)
    output.print(f"\ncompiled with {compiler.name}: {folder}", soft_wrap=True)
    place = shlex.quote(str(folder))
    show_next(f"{command_line('profile')} --artifact {place}" if options.via else f"{command_line('inspect')} {place}")


def _compiler(options: CompilerOptions, run: RunFolder, open_client: Open) -> tuple[Compiler, Compile]:
    if options.wheel:
        folder = wheel_folder(options.wheel)
        facts = {"onnxruntime-qnn": options.wheel, "QAIRT": qairt_version(folder)}
        return Compiler(f"qairt-{facts['QAIRT']}", facts), with_wheel(folder, run.recipe.compile)

    facts = {"service": "AI Hub", "device": options.device or DEFAULT_DEVICE, "QAIRT": options.qairt or "the service's"}
    name = f"{AIHUB}-{options.qairt}" if options.qairt else AIHUB
    return Compiler(name, facts), _via_aihub(open_client(), run, facts["device"], options.qairt)


def _via_aihub(client: HubClient, run: RunFolder, device_name: str, qairt: str | None) -> Compile:
    device = find_device(client, device_name, find_target(run.recipe.target))

    def compile_one(graph: GraphToCompile, target: Target, out_dir: Path) -> Compiled:
        return Compiled(compile_graph(client, device, graph.model, graph.spec, target, qairt, out_dir, _say_state))

    return compile_one


def _say_state(subject: str, state: str) -> None:
    output.print(f"  {subject}: {state.lower().replace('_', ' ')}")


def list_devices(open_client: Open = open_client) -> None:
    """Print the service's devices of chips that this program has targets for.

    Raises:
        HubError: no login, or no answer.
    """
    with hub_errors("asking for devices"):
        devices = open_client().get_devices()
    by_model = {f"{SOC_ATTRIBUTE}{target.soc_model}": target.name for target in TARGETS.values()}
    rows: dict[str, dict[str, str]] = {}
    for device in devices:
        for attribute in device.attributes:
            if attribute in by_model:
                rows[device.name] = {"target": by_model[attribute], "system": device.os}
    show_rows("devices", rows or {"none": {"target": "", "system": ""}})


def profile_run(
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    device_name: str | None,
    feeds: int,
    artifact: Path | None,
    open_client: Open = open_client,
) -> int:
    """Run every compiled graph on a phone of AI Hub, compare, and write `profile.json`; 1 where outputs are outside.

    Raises:
        HycoError: an artifact is missing, or AI Hub refuses.
    """
    run = open_run(recipe_path, run_dir, target)
    require_built(run)
    chosen, gates = find_target(run.recipe.target), run.recipe.compile
    folder = artifact or run.root / artifact_name(COMPILE, chosen.name)
    manifest, graphs = verify(folder), graphs_of(run)
    client = open_client()
    device = find_device(client, device_name or DEFAULT_DEVICE, chosen)
    limits = ParityLimits(gates.output_range_share, gates.max_outside_share, gates.min_id_agreement)
    measured = {}
    for graph in graphs:
        name = graph.spec.name
        samples = read_samples(graph.samples)[name][:feeds]
        pair, keep = folder / f"{name}_ctx.onnx", run.root / OUTPUTS_FOLDER / name
        measured[name] = profile_graph(client, device, pair, graph.model, graph.spec, samples, limits, _say_state, keep)
    profile = DeviceProfile(device.name, device.os, chosen.name, graphs_key(manifest), "AI Hub", measured)
    path = write_profile(run.root, profile)
    _show_profile(profile)
    output.print(f"\nwritten: {path}; outputs: {run.root / OUTPUTS_FOLDER}", soft_wrap=True)
    show_next(command_line("bench"))
    return 0 if all(one.passed for graph in measured.values() for one in graph.outputs) else 1


def profile_bundle(bundle: Path, device_name: str | None, out: Path | None, open_client: Open = open_client) -> int:
    """Run a bundle's graphs on a phone of AI Hub over its golden inputs; 1 where outputs are outside.

    Raises:
        HycoError: the bundle is damaged, or AI Hub refuses.
    """
    from hyco_export.bundle.on_phone import run_on_phone
    from hyco_export.bundle.spec import read_bundle

    read_bundle(bundle)  # that there is one, before a login is asked for
    place = out or bundle.resolve().with_name(f"{bundle.resolve().name}-profile")
    found = run_on_phone(open_client(), bundle, device_name or DEFAULT_DEVICE, place, _say_state)
    _show_profile(found.profile)
    output.print(f"\nwritten: {place / PROFILE_FILE}; outputs beside it", soft_wrap=True)
    output.print(found.comparison.summary, soft_wrap=True)
    show_next(shlex.join([*shlex.split(command_line("compare")), str(bundle), str(place)]))
    return 0 if found.comparison.passed else 1


def _show_profile(profile: DeviceProfile) -> None:
    rows = {}
    for name, graph in profile.graphs.items():
        outside = [one.name for one in graph.outputs if not one.passed]
        rows[name] = {
            "NPU ms": f"{graph.npu_ms:.2f}",
            "runs": graph.runs,
            "peak memory": format_bytes(graph.peak_memory_bytes) if graph.peak_memory_bytes else "not said",
            "on the NPU": "not said" if graph.npu_share is None else f"{graph.npu_share:.0%} of {graph.operators}",
            "outputs": f"OUTSIDE: {', '.join(outside)}" if outside else "within the limits",
        }
    show_rows(f"{profile.device}, {profile.os}", rows)
