"""`bench-peers`: the server's own drafting beside transformers and vLLM, on the same weights and threads."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from hyco_export.cli.console import ConsoleProgress, output, show_rows
from hyco_export.cli.runs import open_run, require_readable_twice
from hyco_export.cli.server_process import server_process

RATIO_DIGITS = 2
AIMED_RATIO = 2.0  # of our tokens per second to those of transformers with the same head


def bench_peers(
    recipe_path: Path | None, run_dir: Path | None, prompts: int, max_new_tokens: int, vllm_python: Path | None
) -> int:
    """Compare, print; 0 when all texts are the same and the aimed ratio is met, else 1."""
    from hyco_export.evaluate.meeting import read_prompts
    from hyco_export.evaluate.peers.comparison import Contestant, compare
    from hyco_export.evaluate.peers.served import CloudMtp
    from hyco_export.evaluate.peers.worker import require_vllm, transformers_peer, vllm_peer
    from hyco_export.nn.checkpoint import checkpoint_folder
    from hyco_export.nn.verifier import load_tokenizer
    from hyco_export.runtime.transport import HttpTransport

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
    show_rows(f"{len(asked)} prompts, greedy, {max_new_tokens} tokens, {threads} threads, loopback HTTP included", rows)
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
