"""vLLM's greedy generation as a worker of `comparison.WorkerPeer`: runs in vLLM's own Python, imports nothing of ours.

Arguments: verifier folder, head folder or "", dtype, steps of the head. Tried with the CPU build of vLLM 0.32.
"""

import json
import os
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w")  # for the JSON lines; what vLLM itself prints goes to stderr
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402


def count_of(metrics: list, name: str) -> int:
    """A counter's value, 0 where there is none."""
    return sum(int(metric.value) for metric in metrics if metric.name == name)


def main(verifier_folder: str, head_folder: str, dtype: str, steps: str) -> None:
    speculation = {"method": "mtp", "model": head_folder, "num_speculative_tokens": int(steps)} if head_folder else None
    model = LLM(
        verifier_folder,
        dtype=dtype,
        speculative_config=speculation,
        enable_prefix_caching=False,
        max_num_seqs=1,
        disable_log_stats=False,  # they hold the number of drafts
    )
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"])
        before = count_of(model.get_metrics(), "vllm:spec_decode_num_drafts")
        start_s = time.perf_counter()
        (output,) = model.generate([{"prompt_token_ids": request["ids"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        tokens = list(output.outputs[0].token_ids)
        drafts = count_of(model.get_metrics(), "vllm:spec_decode_num_drafts") - before
        rounds = drafts if head_folder else len(tokens) - 1
        print(json.dumps({"tokens": tokens, "seconds": seconds, "rounds": rounds}), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
