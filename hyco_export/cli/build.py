"""What the building commands do: open the run, call the stage runner, print the outcome."""

from collections.abc import Sequence
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_forecast, show_metrics, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.cli.options import open_run
from hyco_export.core.targets import TARGETS
from hyco_export.protocol.server_address import LOOPBACK, USUAL_PORT, url_of
from hyco_export.stages.declarations import Stage
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
    build_chain(run, chain)
    names = [stage.name for stage in stages_of(run.recipe)]
    if name != names[-1]:
        show_next(command_line(names[names.index(name) + 1]))
    elif run.recipe.models.head is not None:
        show_next(command_line("serve"))
        output.print(f"then: {command_line('validate', server=url_of(LOOPBACK, USUAL_PORT))}", soft_wrap=True)


def show_plan(run: RunFolder, chain: Sequence[Stage], command: str) -> None:
    """What `command` would do, and the command itself where it can be done."""
    from hyco_export.stages.forecast import forecast  # heavy: after what is refused at once

    plan = forecast(run, chain)
    show_forecast(plan)
    if not plan.missing:
        show_next(command_line(command))


def build_chain(run: RunFolder, chain: Sequence[Stage]) -> None:
    with ConsoleProgress() as progress:
        manifests = build_all(run, chain, progress)
    if not manifests:  # a helper of the main process
        raise SystemExit(0)
    last = chain[-1]
    show_metrics(f"\n{last.name} -> {run.folder(last)}", manifests[last.name].metrics)


def list_targets() -> None:
    """Print the target table: the vendor's numbers, and the bits of weights and activations that compile."""
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
