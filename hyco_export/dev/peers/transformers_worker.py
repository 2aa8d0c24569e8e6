"""transformers' greedy generation as a worker of `comparison.WorkerPeer`: a program that imports nothing of ours.

Arguments: verifier folder, head folder or "", dtype, threads.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM


def main(verifier_folder: str, head_folder: str, dtype: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    verifier = AutoModelForCausalLM.from_pretrained(verifier_folder, dtype=getattr(torch, dtype)).eval()
    helper = {}
    if head_folder:
        head = Gemma4AssistantForCausalLM.from_pretrained(head_folder, dtype=getattr(torch, dtype)).eval()
        helper["assistant_model"] = head
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    verifier.register_forward_pre_hook(count)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["ids"]])
        passes = 0
        start_s = time.perf_counter()
        with torch.inference_mode():
            output = verifier.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["max_new_tokens"],
                do_sample=False,
                **helper,
            )
        seconds = time.perf_counter() - start_s
        tokens = output[0, ids.shape[1] :].tolist()
        print(json.dumps({"tokens": tokens, "seconds": seconds, "rounds": passes - 1}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
