"""What the building commands do: open the run, call the stage runner, print the outcome."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_forecast, show_metrics, show_rows
from hyco_export.cli.launch import is_main
from hyco_export.cli.reach import reach_of
from hyco_export.cli.runs import open_run, require_readable_twice
from hyco_export.cli.server_process import server_process
from hyco_export.cli.validation import validate_in
from hyco_export.stages.forecast import forecast
from hyco_export.stages.plan import chain_to
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.stage import Stage
from hyco_export.stages.table import require_stage, stages_of

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
    if not dry_run:
        require_readable_twice(recipe_path)
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
