"""The worker's lines, in this process: transformers' greedy texts, plain and assisted, and the passes that it made."""

import io
from pathlib import Path

import msgspec
import pytest
import torch

from hyco_export.core.files import CHECKPOINTS
from hyco_export.dev.peers.comparison import Answer
from hyco_export.dev.peers.transformers_worker import main
from hyco_export.models.capture import greedy_answer
from hyco_export.models.verifier import load_verifier

PROMPT = list(range(40, 140))
TOKENS = 40


def ask(head: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    line = msgspec.json.encode({"ids": PROMPT, "max_new_tokens": TOKENS}).decode()
    monkeypatch.setattr("sys.stdin", io.StringIO(line + "\n"))
    main(str(CHECKPOINTS / "verifier"), head, "float32", str(torch.get_num_threads()))
    ready, answer = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert msgspec.json.decode(ready) == {"ready": True}
    return msgspec.json.decode(answer, type=Answer)


@pytest.mark.parametrize("head", ["", "head"])
def test_texts_are_the_verifiers_greedy_ones(
    head: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ask(str(CHECKPOINTS / head) if head else "", monkeypatch, capsys)
    assert list(answer.tokens) == greedy_answer(
        load_verifier(Path(CHECKPOINTS / "verifier"), "float32"), PROMPT, TOKENS
    )
    if head:
        assert answer.rounds < len(answer.tokens) - 1
    else:
        assert answer.rounds == len(answer.tokens) - 1
