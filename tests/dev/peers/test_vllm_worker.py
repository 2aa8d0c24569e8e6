"""The worker's lines, with a module in the place of vLLM that prints, counts drafts and answers."""

import subprocess
import sys
from pathlib import Path

import msgspec

from hyco_export.dev.peers import comparison
from hyco_export.dev.peers.comparison import Answer, WorkerPeer

WORKER = Path(comparison.__file__).with_name("vllm_worker.py")
VLLM = """
from types import SimpleNamespace
print("loading kernels")
SamplingParams = lambda temperature, max_tokens: SimpleNamespace(temperature=temperature, max_tokens=max_tokens)
class LLM:
    def __init__(self, folder, dtype, speculative_config, **options):
        print("model", folder, dtype)
        self.drafts, self.speculation = 5, speculative_config
    def get_metrics(self):
        metrics = {"vllm:spec_decode_num_drafts": self.drafts, "vllm:other": 9}
        return [SimpleNamespace(name=name, value=value) for name, value in metrics.items()]
    def generate(self, prompts, sampling, use_tqdm):
        assert sampling.temperature == 0.0 and self.speculation in (None, {
            "method": "mtp", "model": "head", "num_speculative_tokens": 4})
        self.drafts += 3
        ids = prompts[0]["prompt_token_ids"]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[ids[-1]] * sampling.max_tokens)])]
"""


def peer(folder: Path, head: str) -> WorkerPeer:
    (folder / "vllm.py").write_text(VLLM)
    command = [sys.executable, str(WORKER), "verifier", head, "float32", "4"]
    return WorkerPeer("vLLM", command, {"PYTHONPATH": str(folder)})


def test_rounds_are_drafts_with_a_head_and_tokens_without(tmp_path: Path) -> None:
    with peer(tmp_path, "head") as assisted:
        answer = assisted.answer([1, 2, 9], 7)
        assert (answer.tokens, answer.rounds) == ((9,) * 7, 3)
        assert answer.seconds > 0
    with peer(tmp_path, "") as plain:
        assert plain.answer([1, 8], 5).rounds == 4


def test_what_vllm_prints_is_not_among_the_answers(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    done = subprocess.run(
        [sys.executable, str(WORKER), "verifier", "", "float32", "4"],
        input='{"ids": [5], "max_new_tokens": 2}\n',
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    ready, answer = done.stdout.splitlines()
    assert msgspec.json.decode(ready) == {"ready": True}
    assert msgspec.json.decode(answer, type=Answer).tokens == (5, 5)
    assert "loading kernels" in done.stderr and "model verifier float32" in done.stderr
