"""What `dev bench-peers` and `dev bench-counting` do: our speed beside that of others on the same work."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from hyco_export.cli.console import ConsoleProgress, output, show_metrics, show_rows
from hyco_export.cli.options import open_run, require_readable_twice
from hyco_export.cli.server_process import server_process
from hyco_export.dev.counting_bench import bench_counting, write_created
from hyco_export.dev.peers.comparison import (
    CloudMtp,
    Comparison,
    Contestant,
    WorkerPeer,
    compare,
    require_vllm,
    transformers_peer,
    vllm_peer,
)
from hyco_export.device.client import HttpTransport
from hyco_export.errors import counted
from hyco_export.evaluate.connect import read_prompts
from hyco_export.models.text.tokenizer import open_tokenizer
from hyco_export.models.verifier import load_tokenizer
from hyco_export.stages.run_folder import RunFolder

RATIO_DIGITS = 2
AIMED_RATIO = 2.0  # of our tokens per second to those of transformers with the same head


def measure_counting(
    recipe_path: Path | None, run_dir: Path | None, tokenizer_dir: Path | None, created: int | None
) -> None:
    """Print the speed of counting beside the tokenizer's own, over the recipe's conversations or created ones."""
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


def bench_peers(
    recipe_path: Path | None, run_dir: Path | None, prompts: int, max_new_tokens: int, vllm_python: Path | None
) -> int:
    """Compare, print; 0 when all texts are the same and the aimed ratio is met, else 1."""
    require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir)
    if vllm_python is not None:
        require_vllm(vllm_python)
    recipe = run.recipe
    threads = recipe.threads or os.cpu_count() or 1
    peers = _peers(run, threads, vllm_python)
    source = run.source("validation", recipe.data.validation)
    tokenizer = load_tokenizer(run.source("verifier", recipe.models.verifier))
    asked = [(prompt.id, prompt.ids) for prompt in read_prompts(source, tokenizer, prompts, "--prompts")]
    run.root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, ConsoleProgress() as progress:
        server = stack.enter_context(server_process(recipe_path, run.root))
        contestants: list[Contestant] = [
            CloudMtp(HttpTransport(server.url), recipe.head.steps),
            *map(stack.enter_context, peers),
        ]
        comparison = compare(contestants, asked, max_new_tokens, progress.step)
    work = f"{counted(len(asked), 'prompt')}, greedy, {max_new_tokens} tokens, {threads} threads"
    _show_standings(comparison, f"{work}, loopback HTTP included")
    if vllm_python is None:
        output.print("vLLM was not asked: give --vllm-python, a Python that has its CPU build")
    return 0 if _is_met(comparison, peers[0].name) else 1


def _peers(run: RunFolder, threads: int, vllm_python: Path | None) -> list[WorkerPeer]:
    """transformers with the head and without, and vLLM in the same way where it is asked for."""
    models = run.recipe.models
    verifier, head = run.source("verifier", models.verifier), run.source("head", models.require_head())
    dtype = models.verifier.dtype
    here = Path(sys.executable)
    peers = [transformers_peer(here, verifier, helper, threads, dtype) for helper in (head, None)]
    if vllm_python is not None:
        steps = run.recipe.head.steps
        peers += [vllm_peer(vllm_python, verifier, helper, threads, dtype, steps) for helper in (head, None)]
    return peers


def _show_standings(comparison: Comparison, title: str) -> None:
    """One row a program; then the prompts that one of them answers otherwise."""
    rows = {
        standing.name: {
            "tok/s": round(standing.tokens_per_s, 1),
            "ours / its": round(comparison.ratio(standing.name), RATIO_DIGITS),
            "MAT": round(standing.mat, RATIO_DIGITS),
            "other texts": len(standing.differing),
        }
        for standing in comparison.standings
    }
    show_rows(title, rows)


def _is_met(comparison: Comparison, assisted: str) -> bool:
    """Are all texts the same, and is the server as fast as aimed at beside `assisted`; says both."""
    if not comparison.same_text:
        for standing in comparison.standings:
            if standing.differing:
                output.print(f"{standing.name} says something else for {', '.join(standing.differing)}")
    ratio = comparison.ratio(assisted)
    met = ratio >= AIMED_RATIO
    verdict = f"{ratio:.{RATIO_DIGITS}f} times the tokens per second of {assisted}: {'at least' if met else 'below'}"
    output.print(f"{verdict} the {AIMED_RATIO:g} aimed at", soft_wrap=True)
    return comparison.same_text and met
