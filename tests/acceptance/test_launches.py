"""Capture and QAT by `accelerate launch` with two processes on the CPU: what one process gives, and one voice."""

import json
import re
from pathlib import Path

import pytest

from hyco_export.core.artifact import Manifest
from tests.acceptance.short_runs import RUN_TIMEOUT_S, complete, decode_lines, short_recipe, start, whole

pytestmark = pytest.mark.slow

# long enough that a step has several packs: both processes train
WORK = {
    "capture": {"max_new_tokens": 64, "validation_max_new_tokens": 8, "sampled_answers": 1},
    "qat": {"steps": 6, "warmup_steps": 2, "accumulation": 24},
}
TRAINING = ("calibration", "sampled")
TOO_LONG = "again and " * 2000


def mean_rows(capture: Manifest) -> float:
    """Answer tokens of a sequence that trains the head."""
    tokens, sequences = capture.metrics["answer_tokens"], capture.metrics["sequences"]
    return sum(tokens[split] for split in TRAINING) / sum(sequences[split] for split in TRAINING)


def test_two_processes_give_the_artifacts_of_one(tmp_path: Path) -> None:
    recipe = short_recipe(tmp_path, 5, **WORK)
    complete("qat-head", recipe, tmp_path / "one")
    output = complete("qat-head", recipe, tmp_path / "two", processes=2)

    for stage in ("capture", "qat-head"):
        one, two = whole(tmp_path / "one", stage), whole(tmp_path / "two", stage)
        assert (one.key, one.files) == (two.key, two.files)
        assert len(one.files) > 2
    losses = [
        [point["loss"] for point in decode_lines(tmp_path / run / "qat-head/curve.jsonl")] for run in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert len(losses[0]) == 6
    assert output.count("[1/2] capture: not built yet") == 1  # one voice
    assert len(re.findall(r"^next: .*hyco_export build-keepset --recipe ", output, re.MULTILINE)) == 1


def test_a_failing_worker_ends_the_launch_with_one_message(tmp_path: Path) -> None:
    recipe = short_recipe(tmp_path, 2, **WORK)
    prompts = tmp_path / "calibration.jsonl"
    first = decode_lines(prompts)[0]
    second = {"id": "long", "messages": [{"role": "user", "content": TOO_LONG}]}  # the second process's
    prompts.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    process = start("capture", recipe, tmp_path / "run", processes=2)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode != 0
    assert output.count("error:") == 1
    assert "$.capture.sequence_limit is 2048" in output
    assert not (tmp_path / "run" / "capture").exists()
