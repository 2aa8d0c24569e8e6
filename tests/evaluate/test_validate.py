"""The order of a validation, and what reaches the report."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hyco_export.errors import ProtocolError, RecipeError, ServerError
from hyco_export.evaluate import connect
from hyco_export.evaluate import validate as module
from hyco_export.evaluate.connect import Checkpoints, Subject, read_prompts
from hyco_export.evaluate.diagnosis.finding import Diagnosis, Finding
from hyco_export.evaluate.metrics import measure
from hyco_export.evaluate.runs import GREEDY
from hyco_export.evaluate.validate import check_backends, notes, system_notes, validate
from hyco_export.protocol.wire import Sampling, Traffic
from tests.evaluate.synthetic_reports import hybrid_tree, synthetic_report
from tests.evaluate.synthetic_run import ARTIFACTS, INFO, KEEPSET, RECIPE
from tests.evaluate.synthetic_traces import generation, local_trace, round_trace
from tests.support.builders import small_tokenizer

OVERHEAD_BYTES = 33
CHECKPOINTS = Checkpoints(Path("verifier"), Path("head"), Path("slm"))
FOUND = Diagnosis(32, (0.8,), (0.1,), (Finding("norm side", "the server", "h arrives from before it", "correct it"),))
TEXTS = ["What does a list keep?", "Say it again, please.", "Brackets nest.", "Once more."]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class ScriptedRunner:
    """Greedy answers count up from the prompt's length; the other systems send one tree."""

    def __init__(self, *_, wrong_backend=""):
        self.calls = []
        self._wrong_backend = wrong_backend

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, system, backend, prompt, sampling, max_new_tokens):
        self.calls.append((system, backend, prompt.id, sampling, max_new_tokens))
        if sampling == GREEDY:
            start = len(prompt.ids) + (system != "plain" and backend == self._wrong_backend)
            record = round_trace((), tokens=tuple(range(start, start + max_new_tokens - 1)))
        elif system == "cloud-mtp":
            record = round_trace((0, 1), drafted=4, traffic=Traffic(15, 40, 180, 150))
        else:
            handoff = ARTIFACTS.head.handoff
            down = handoff.round_bytes + 4 * handoff.row_bytes + OVERHEAD_BYTES
            record = round_trace((0, 1, 2), tree=hybrid_tree(random.Random(3)), traffic=Traffic(140, down, 300, 900))
        return generation(record, system=system, prompt_id=prompt.id)


@pytest.fixture
def scripted_world(monkeypatch, tokenizer, prompt_file, tmp_path):
    """Everything that needs a server, artifacts or models is scripted."""

    class Transport:
        def __init__(self, url):
            pass

        def info(self):
            return INFO

    runners = []

    def make_runner(*args):
        runners.append(ScriptedRunner())
        return runners[-1]

    monkeypatch.setattr(connect, "HttpTransport", Transport)
    monkeypatch.setattr(module, "diagnose", lambda *_: Diagnosis(32, (0.8,), (0.8,), ()))
    monkeypatch.setattr(module, "compare_backends", lambda *_: synthetic_report().parity)
    monkeypatch.setattr(module, "DeviceRunner", make_runner)
    monkeypatch.setattr("hyco_export.models.checkpoints.tokenizer_digest", lambda folder: INFO.tokenizer_digest)
    monkeypatch.setattr("hyco_export.models.verifier.load_tokenizer", lambda folder: tokenizer)
    return Subject(Path("run"), RECIPE, ARTIFACTS, CHECKPOINTS, prompt_file), runners


def test_a_validation_measures_every_system_and_gates_it(scripted_world):
    subject, runners = scripted_world
    report = validate(subject, "http://here:1", lambda *_: None)
    assert [system.system for system in report.systems] == list(RECIPE.validation.systems)
    assert [system.prompts for system in report.systems] == [3, 3, 3]
    assert [(row.backend, row.prompts, row.max_new_tokens) for row in report.losslessness] == [
        ("torch", 3, 16), ("onnx-cpu", 3, 16), ("qnn", 1, 6),
    ]  # fmt: skip
    assert report.verdict == "pass"
    assert [row.system for row in report.times] == list(RECIPE.validation.systems)
    assert report.tree is not None and report.tree.system == "hyco"
    sampled = {call[3] for call in runners[0].calls if call[0] == "hyco"}
    assert sampled == {Sampling(1.0, 64, 0.95)}


def test_a_finding_fails_a_run_whose_gates_hold(scripted_world, monkeypatch):
    subject, _ = scripted_world
    monkeypatch.setattr(module, "diagnose", lambda *_: FOUND)
    report = validate(subject, "http://here:1", lambda *_: None)
    assert report.verdict == "fail" and all(gate.passed for gate in report.gates)
    assert report.diagnosis == FOUND


def test_what_a_fault_breaks_later_is_said_with_its_name(scripted_world, monkeypatch):
    def refuse(*_):
        raise ProtocolError("handoff_gap", "K/V rows of positions 3 to 5")

    subject, _ = scripted_world
    monkeypatch.setattr(module, "diagnose", lambda *_: FOUND)
    monkeypatch.setattr(module, "run_interleaved", refuse)
    with pytest.raises(
        ProtocolError, match=r"rows of positions 3 to 5; the diagnosis before it: norm side, the server"
    ):
        validate(subject, "http://here:1", lambda *_: None)


def test_the_baselines_replies_carry_no_hand_off_and_the_others_do(scripted_world):
    subject, _ = scripted_world
    traffic = validate(subject, "http://here:1", lambda *_: None).traffic
    overheads = {row.system: row.down_overhead_max_bytes for row in traffic}
    assert overheads == {"cloud-mtp": 40, "hyco-exact": OVERHEAD_BYTES, "hyco": OVERHEAD_BYTES}


def test_a_server_of_another_run_stops_it_before_the_first_prompt(scripted_world, monkeypatch):
    subject, runners = scripted_world
    subject = replace(subject, artifacts=replace(ARTIFACTS, head_key="x" * 64))
    with pytest.raises(ServerError, match=r"does not belong to this run: head artifact"):
        validate(subject, "http://here:1", lambda *_: None)
    assert runners == []


def test_a_dead_url_is_said_within_seconds_and_before_any_file_is_read(tmp_path):
    subject = Subject(tmp_path / "nothing", RECIPE, ARTIFACTS, CHECKPOINTS, tmp_path / "none.jsonl")
    began = time.monotonic()
    with pytest.raises(ServerError) as caught:
        validate(subject, "http://127.0.0.1:9", lambda *_: None)
    assert time.monotonic() - began < 5
    assert caught.value.exit_code == 2
    assert "http://127.0.0.1:9" in caught.value.message
    assert "hyco-export serve" in caught.value.hint


def test_prompts_go_through_the_chat_template(tokenizer, prompt_file):
    prompts = read_prompts(prompt_file, tokenizer, 2)
    assert [prompt.id for prompt in prompts] == ["p0", "p1"]
    text = tokenizer.decode(prompts[0].ids)
    assert text.startswith("<bos><|turn>user") and text.endswith("<|turn>model\n")
    assert len(read_prompts(prompt_file, tokenizer, 4)) == 4
    with pytest.raises(RecipeError, match=r"\$.validation.prompts is 5, but .* holds 4"):
        read_prompts(prompt_file, tokenizer, 5)
    with pytest.raises(RecipeError, match=r"--prompts is 5, but .* holds 4 \(at most 4, or add prompts\)"):
        read_prompts(prompt_file, tokenizer, 5, "--prompts")


def test_prompt_files_that_cannot_be_used_are_named(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n' * 2)
    with pytest.raises(RecipeError, match=r"\$.data.validation: .*prompts.jsonl holds 'a' twice, ids must be unique"):
        read_prompts(path, tokenizer, 3)


def test_a_missing_prompt_file_is_named(tokenizer, tmp_path):
    with pytest.raises(RecipeError, match=r"\$.data.validation: .*none.jsonl does not exist"):
        read_prompts(tmp_path / "none.jsonl", tokenizer, 3)


def test_a_back_end_that_changes_the_text_is_found(tokenizer, prompt_file):
    prompts = read_prompts(prompt_file, tokenizer, 3)
    rows = check_backends(ScriptedRunner(wrong_backend="onnx-cpu"), prompts, RECIPE.validation, lambda *_: None)
    assert [(row.backend, len(row.differences)) for row in rows] == [("torch", 0), ("onnx-cpu", 3), ("qnn", 0)]


def test_every_greedy_system_is_compared_on_every_back_end(tokenizer, prompt_file):
    plan = msgspec.structs.replace(RECIPE.validation, greedy_systems=("specedge-pd", "hyco-2p"))
    rows = check_backends(ScriptedRunner(), read_prompts(prompt_file, tokenizer, 3), plan, lambda *_: None)
    assert [(row.system, row.backend) for row in rows] == [
        (system, backend) for system in plan.greedy_systems for backend in ("torch", "onnx-cpu", "qnn")
    ]


def test_plain_decoding_is_asked_once_per_prompt(tokenizer, prompt_file):
    runner = ScriptedRunner()
    check_backends(runner, read_prompts(prompt_file, tokenizer, 3), RECIPE.validation, lambda *_: None)
    assert [call[2] for call in runner.calls if call[0] == "plain"] == ["p0", "p1", "p2"]


def test_notes_say_what_the_emulator_ran():
    plan = RECIPE.validation
    assert "ran 1 prompt of up to 6 tokens" in notes(plan, 3)[0]
    assert "of up to 16" in notes(msgspec.structs.replace(plan, emulator_max_new_tokens=99), 3)[0]


def test_the_recipes_list_of_systems_is_what_runs(scripted_world):
    subject, runners = scripted_world
    systems = ("hyco-2p", "cloud-mtp", "specedge-pd", "hyco-server-head")
    plan = msgspec.structs.replace(RECIPE.validation, systems=systems)
    subject = replace(subject, recipe=msgspec.structs.replace(RECIPE, validation=plan))
    report = validate(subject, "http://here:1", lambda *_: None)
    assert [system.system for system in report.systems] == list(systems)
    assert {call[0] for call in runners[0].calls} == {*systems, "plain", "hyco-exact"}
    overheads = {row.system: row.down_overhead_max_bytes for row in report.traffic}
    assert overheads["hyco-2p"] == OVERHEAD_BYTES < overheads["specedge-pd"]  # which is sent no hand-off
    assert "The SLM drafts over its artifact's 60 of 128 tokens." in report.notes


def test_a_system_that_keeps_tokens_claims_no_losslessness():
    unverified = measure("synera", [generation(round_trace((0,), kept=(7, 8)), locals=(local_trace((7, 8)),))], KEEPSET)
    alone = measure("on-device", [generation(primes=(), locals=(local_trace((7, 8, 9)),))], KEEPSET)
    notes = system_notes((unverified, alone), 60, 128)
    assert notes[0].startswith("synera is not lossless: 2 of 5 tokens are unverified")
    assert notes[1].startswith("on-device is not lossless: 3 of 3 tokens are unverified")
    assert system_notes((measure("hyco", [generation(round_trace((0,)))], KEEPSET),), 60, 128) == ()
