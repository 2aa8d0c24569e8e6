"""What the building commands do: open the run, call the stage runner, print the outcome."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from hyco_export.cli.console import ConsoleProgress, output, show_forecast, show_metrics, show_next, show_rows
from hyco_export.cli.invocation import command_line, is_main
from hyco_export.cli.options import open_run, reach_of, require_readable_twice
from hyco_export.cli.serve import server_process
from hyco_export.cli.validation import validate_in
from hyco_export.errors import interrupt_keeps
from hyco_export.protocol.server_address import LOOPBACK, USUAL_PORT, url_of
from hyco_export.stages.declarations import Stage
from hyco_export.stages.forecast import forecast
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import chain_to, require_stage, stages_of


def build_stage(name: str, recipe_path: Path | None, run_dir: Path | None, target: str | None, dry_run: bool) -> None:
    """Build one stage and whatever it needs that is not fresh; print its metrics and the next command."""
    run = open_run(recipe_path, run_dir, target)
    require_stage(run.recipe, name)
    chain = chain_to(stages_of(run.recipe), name)
    if dry_run:
        show_plan(run, chain, name)
        return
    _build(run, chain)
    names = [stage.name for stage in stages_of(run.recipe)]
    if name != names[-1]:
        show_next(command_line(names[names.index(name) + 1]))
    elif run.recipe.models.head is not None:
        show_next(command_line("serve"))
        output.print(f"then: {command_line('validate', server=url_of(LOOPBACK, USUAL_PORT))}", soft_wrap=True)


def show_plan(run: RunFolder, chain: Sequence[Stage], command: str) -> None:
    """What `command` would do, and the command itself where it can be done."""
    plan = forecast(run, chain)
    show_forecast(plan)
    if not plan.missing:
        show_next(command_line(command))


def _build(run: RunFolder, chain: Sequence[Stage]) -> None:
    with ConsoleProgress() as progress:
        manifests = build_all(run, chain, progress)
    if not manifests:  # a helper of the main process
        raise SystemExit(0)
    last = chain[-1]
    show_metrics(f"\n{last.name} -> {run.folder(last)}", manifests[last.name].metrics)


def run_everything(recipe_path: Path | None, run_dir: Path | None, target: str | None, dry_run: bool) -> int:
    """The whole chain, then serve and validate; the exit code of the validation."""
    if not dry_run:
        require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir, target)
    if dry_run:
        show_plan(run, stages_of(run.recipe), "run")
        return 0
    if run.recipe.models.head is None:
        _build(run, stages_of(run.recipe))
        output.print("\nno head in the recipe: nothing to serve or to validate")
        return 0
    with run.lock() if is_main() else nullcontext():  # nobody builds what is being validated
        _build(run, stages_of(run.recipe))

        def kept() -> str:
            return f"all artifacts in {run.root}, not the validation"

        with interrupt_keeps(kept), server_process(recipe_path, run.root, kept) as server:
            reach = reach_of(None, None, False, None, False)  # with the environment's token, which the server asks for
            return validate_in(run, server.url, msgspec.structs.replace(reach, still_there=server.require_running))


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
