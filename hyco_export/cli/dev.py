"""What `hyco-export dev ...` does: make checkpoints, and compare our speed with that of others on the same work."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_metrics, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.cli.options import open_run, require_readable_twice
from hyco_export.cli.serve import server_process
from hyco_export.errors import HycoError, counted

PERCENT = 100
RATIO_DIGITS = 2
AIMED_RATIO = 2.0  # of our tokens per second to those of transformers with the same head
RESPELLED = "respelled"  # not a scale: the embedded family with an SLM of another vocabulary


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
    from hyco_export.dev.created.recipe import new_folder
    from hyco_export.dev.tiny.family import DEFAULT_SEED, train_family

    with ConsoleProgress() as progress, new_folder(out) as partial:
        train_family(
            partial,
            seed=DEFAULT_SEED,
            quick=quick,
            on_progress=lambda label, share: progress.step(label, round(PERCENT * share), PERCENT),
        )
    output.print((out / "MODEL_CARD.md").read_text(encoding="utf-8"))


def create_checkpoint_family(out: Path, scale_name: str, tokenizer: Path | None) -> None:
    """Write created checkpoints into a new folder; print the command that runs them."""
    require_new(out)
    if scale_name == RESPELLED:
        from hyco_export.dev.created.tokenizer import create_respelled

        show_next(command_line("run", recipe=create_respelled(out)))
        return
    from hyco_export.dev.created.family import DEFAULT_SEED, create_family
    from hyco_export.dev.created.recipe import RECIPE_FILE
    from hyco_export.models.families.released_configs import find_scale

    scale = find_scale(scale_name)
    with ConsoleProgress() as progress:
        create_family(
            out,
            scale,
            tokenizer,
            DEFAULT_SEED,
            lambda label, share: progress.step(label, int(PERCENT * share), PERCENT),
        )
    show_next(command_line("run", recipe=out / RECIPE_FILE))


def measure_counting(
    recipe_path: Path | None, run_dir: Path | None, tokenizer_dir: Path | None, created: int | None
) -> None:
    """Print the speed of counting beside the tokenizer's own, over the recipe's conversations or created ones."""
    from tempfile import TemporaryDirectory

    from hyco_export.dev.counting_bench import bench_counting, write_created
    from hyco_export.models.text.tokenizer import open_tokenizer

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


def refit_estimates(scale_names: Sequence[str]) -> None:
    """Print the fitted coefficients, and how far the estimates are off without and with them."""
    from hyco_export.models.families.released_configs import find_scale

    scales = [find_scale(name) for name in scale_names]
    from hyco_export.dev.estimate_fit import fit_estimates

    with ConsoleProgress() as progress:
        fit = fit_estimates(scales, progress.step)
    show_rows("estimates beside what the stages took", fit.errors)
    show_rows("coefficients: write those that differ into core/estimates/coefficients.py", fit.table)


def bench_peers(
    recipe_path: Path | None, run_dir: Path | None, prompts: int, max_new_tokens: int, vllm_python: Path | None
) -> int:
    """Compare, print; 0 when all texts are the same and the aimed ratio is met, else 1."""
    from hyco_export.dev.peers.comparison import (
        CloudMtp,
        Contestant,
        compare,
        require_vllm,
        transformers_peer,
        vllm_peer,
    )
    from hyco_export.device.client import HttpTransport
    from hyco_export.evaluate.connect import read_prompts
    from hyco_export.models.checkpoints import checkpoint_folder
    from hyco_export.models.verifier import load_tokenizer

    require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir)
    if vllm_python is not None:
        require_vllm(vllm_python)
    recipe = run.recipe
    threads = recipe.threads or os.cpu_count() or 1
    verifier = checkpoint_folder(recipe.models.verifier, run.recipe_folder)
    head = checkpoint_folder(recipe.models.require_head(), run.recipe_folder)
    dtype = recipe.models.verifier.dtype
    source = run.source("validation", recipe.data.validation)
    asked = [(prompt.id, prompt.ids) for prompt in read_prompts(source, load_tokenizer(verifier), prompts, "--prompts")]
    run.root.mkdir(parents=True, exist_ok=True)
    here = Path(sys.executable)
    with ExitStack() as stack, ConsoleProgress() as progress:
        server = stack.enter_context(server_process(recipe_path, run.root))
        peers = [transformers_peer(here, verifier, helper, threads, dtype) for helper in (head, None)]
        assisted = peers[0].name
        if vllm_python is not None:
            steps = recipe.head.steps
            peers += [vllm_peer(vllm_python, verifier, helper, threads, dtype, steps) for helper in (head, None)]
        contestants: list[Contestant] = [
            CloudMtp(HttpTransport(server.url), recipe.head.steps),
            *map(stack.enter_context, peers),
        ]
        comparison = compare(contestants, asked, max_new_tokens, progress.step)
    rows = {
        standing.name: {
            "tok/s": round(standing.tokens_per_s, 1),
            "ours / its": round(comparison.ratio(standing.name), RATIO_DIGITS),
            "MAT": round(standing.mat, RATIO_DIGITS),
            "other texts": len(standing.differing),
        }
        for standing in comparison.standings
    }
    show_rows(
        f"{counted(len(asked), 'prompt')}, greedy, {max_new_tokens} tokens, {threads} threads, loopback HTTP included",
        rows,
    )
    if vllm_python is None:
        output.print("vLLM was not asked: give --vllm-python, a Python that has its CPU build")
    if not comparison.same_text:
        for standing in comparison.standings:
            if standing.differing:
                output.print(f"{standing.name} says something else for {', '.join(standing.differing)}")
    ratio = comparison.ratio(assisted)
    met = ratio >= AIMED_RATIO
    verdict = f"{ratio:.{RATIO_DIGITS}f} times the tokens per second of {assisted}: {'at least' if met else 'below'}"
    output.print(f"{verdict} the {AIMED_RATIO:g} aimed at", soft_wrap=True)
    return 0 if comparison.same_text and met else 1
