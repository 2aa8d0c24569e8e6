"""Devices are opened once per back end, requests follow the recipe, everything is closed."""

import math
from pathlib import Path

import msgspec
import pytest

from hyco_export.device.drafters import NullDrafter, TreeRule
from hyco_export.device.offload import AskForAll
from hyco_export.errors import HycoError, ServerError
from hyco_export.evaluate import runs
from hyco_export.evaluate.connect import Prompt
from hyco_export.evaluate.runs import (
    GREEDY,
    WARM_UP_TOKENS,
    DeviceRunner,
    check_greedy,
    plain_texts,
    prompt_seed,
    run_interleaved,
)
from hyco_export.protocol.wire import PAPER_SAMPLING, Acceptance, Sampling
from tests.evaluate.synthetic_run import ARTIFACTS, INFO, RECIPE
from tests.evaluate.synthetic_traces import generation, round_trace

PROMPT = Prompt("p1", (2, 5))
TRACE = generation(round_trace((0,)))


class FakeDevice:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def world(monkeypatch):
    """Records what is opened and generated instead of doing it."""
    opened, generated = {}, []

    def open_device(root, backend, target):
        assert backend not in opened, "opened twice"
        opened[backend] = FakeDevice()
        return opened[backend]

    def make_drafter(system, settings, device):
        return ("drafter", system.name, device) if system.needs_device else NullDrafter()

    def begin(ids, request, drafter, transport, clock, policy):
        assert isinstance(policy, AskForAll)
        generated.append((ids, request, drafter, transport))
        return TRACE

    monkeypatch.setattr(runs, "open_device", open_device)
    monkeypatch.setattr(runs, "make_drafter", make_drafter)
    monkeypatch.setattr(runs, "Generation", begin)
    monkeypatch.setattr(runs, "finish", lambda trace: trace)
    return opened, generated


def test_a_back_end_is_opened_once_and_closed_at_the_end(world):
    opened, generated = world
    with DeviceRunner(ARTIFACTS, RECIPE, "transport", INFO) as runner:
        for system in ("plain", "cloud-mtp"):
            runner.generate(system, "torch", PROMPT, PAPER_SAMPLING, 8)
        assert opened == {}  # neither drafts on the device
        for system in ("hyco", "hyco-exact", "hyco"):
            assert runner.generate(system, "torch", PROMPT, PAPER_SAMPLING, 8) == TRACE
        runner.generate("hyco", "qnn", PROMPT, PAPER_SAMPLING, 8)
        assert sorted(opened) == ["qnn", "torch"]
        assert not any(device.closed for device in opened.values())
    assert all(device.closed for device in opened.values())
    assert generated[2][2] is generated[4][2]  # the same system keeps its drafter
    assert generated[2][2] is not generated[5][2]


def test_a_request_follows_recipe_artifacts_and_prompt(world):
    _, generated = world
    with DeviceRunner(ARTIFACTS, RECIPE, "transport", INFO) as runner:
        runner.generate("hyco", "torch", PROMPT, Sampling(0.0, 0, 1.0), 8)
    ids, request, _, transport = generated[0]
    assert (ids, transport) == (PROMPT.ids, "transport")
    assert (request.prompt_id, request.max_new_tokens) == ("p1", 8)
    assert request.sampling == Sampling(0.0, 0, 1.0)
    assert request.acceptance == Acceptance("epsilon", RECIPE.validation.epsilon)
    assert request.head_digest == ARTIFACTS.head_key
    assert request.first_rows == 0  # the paper's way


def test_the_first_reply_may_be_short_where_a_head_drafts(world):
    _, generated = world
    recipe = msgspec.structs.replace(RECIPE, validation=msgspec.structs.replace(RECIPE.validation, first_reply_rows=64))
    with DeviceRunner(ARTIFACTS, recipe, None, INFO) as runner:
        for system in ("hyco", "cloud-mtp"):
            runner.generate(system, "torch", PROMPT, PAPER_SAMPLING, 8)
    assert [request.first_rows for _, request, *_ in generated] == [64, 0]


def test_a_prompt_that_the_server_has_no_room_for_is_not_sent(world):
    _, generated = world
    small = msgspec.structs.replace(INFO, context_limit=len(PROMPT.ids) + 7)
    with DeviceRunner(ARTIFACTS, RECIPE, "transport", small) as runner:
        runner.generate("plain", "torch", PROMPT, PAPER_SAMPLING, 7)
        with pytest.raises(HycoError, match="prompt p1 and its answer need"):
            runner.generate("plain", "torch", PROMPT, PAPER_SAMPLING, 8)
    assert len(generated) == 1


def test_prompts_differ_in_their_seed_and_systems_do_not(world):
    _, generated = world
    with DeviceRunner(ARTIFACTS, RECIPE, "transport", INFO) as runner:
        for system, prompt_id in (("hyco", "p1"), ("cloud-mtp", "p1"), ("hyco", "p2")):
            runner.generate(system, "torch", Prompt(prompt_id, (2,)), PAPER_SAMPLING, 8)
    seeds = [request.seed for _, request, _, _ in generated]
    assert seeds[0] == seeds[1] == prompt_seed(RECIPE.validation.seed, "p1")
    assert seeds[2] != seeds[0]
    assert prompt_seed(RECIPE.validation.seed + 1, "p1") != seeds[0]


def test_devices_are_closed_when_a_generation_fails(world):
    opened, _ = world
    with pytest.raises(HycoError, match="unknown system"), DeviceRunner(ARTIFACTS, RECIPE, None, INFO) as runner:
        runner.generate("hyco", "torch", PROMPT, PAPER_SAMPLING, 8)
        runner.generate("no such", "torch", PROMPT, PAPER_SAMPLING, 8)
    assert opened["torch"].closed


def test_an_edge_costs_the_log_of_the_assumed_acceptance():
    rule = TreeRule.of_hybrid(msgspec.structs.replace(RECIPE.drafting, chain_acceptance=0.5, budget=20))
    assert (rule.edge_log_prob, rule.budget) == (math.log(0.5), 20)


def test_the_run_folder_and_target_reach_the_device(monkeypatch, world):
    seen = []
    monkeypatch.setattr(runs, "open_device", lambda *where: seen.append(where) or FakeDevice())
    with DeviceRunner(ARTIFACTS, RECIPE, None, INFO) as runner:
        runner.generate("hyco", "qnn", PROMPT, PAPER_SAMPLING, 8)
    assert seen == [(Path("run"), "qnn", RECIPE.target)]


def test_after_an_outage_the_same_server_must_answer(monkeypatch, world):
    """Its restart may have brought another checkpoint: figures of two servers must not be pooled."""

    class Back:
        info_now = INFO

        def info(self):
            return self.info_now

    back = Back()
    disturbed = generation(round_trace((0,), lost_ms=5.0))
    monkeypatch.setattr(runs, "finish", lambda _: disturbed)
    with DeviceRunner(ARTIFACTS, RECIPE, back, INFO) as runner:
        assert runner.generate("plain", "torch", PROMPT, PAPER_SAMPLING, 8) is disturbed
        back.info_now = msgspec.structs.replace(INFO, rows_ms=[(1, 2.0), (5, 2.5)])  # measured anew at every start
        assert runner.generate("plain", "torch", PROMPT, PAPER_SAMPLING, 8) is disturbed
        back.info_now = msgspec.structs.replace(INFO, verifier_digest="w" * 64)
        with pytest.raises(ServerError, match="another server answers than at the start of the run: verifier_digest"):
            runner.generate("plain", "torch", PROMPT, PAPER_SAMPLING, 8)


# The order of generations, and what is compared with what.


PROMPTS = [Prompt("a", (1, 2)), Prompt("b", (3,)), Prompt("c", (4,))]


class ScriptedRunner:
    """Answers with the prompt's first id repeated, cut at the limit; remembers what it was asked."""

    def __init__(self, wrong=()):
        self.calls = []
        self._wrong = wrong

    def generate(self, system, backend, prompt, sampling, max_new_tokens):
        self.calls.append((system, backend, prompt.id, sampling, max_new_tokens))
        token = -7 if (system, prompt.id) in self._wrong else prompt.ids[0]
        record = round_trace((), tokens=(token,) * (max_new_tokens - 1))
        return generation(record, system=system, prompt_id=prompt.id)


def ignore(label, done, total):
    pass


def test_all_systems_answer_a_prompt_before_the_next_and_take_turns_in_going_first():
    runner = ScriptedRunner()
    sampling = PAPER_SAMPLING
    traces = run_interleaved(runner, ("x", "y"), "onnx-cpu", PROMPTS, sampling, 16, ignore)
    assert [call[:3:2] for call in runner.calls[2:]] == [
        ("x", "a"), ("y", "a"), ("y", "b"), ("x", "b"), ("x", "c"), ("y", "c"),
    ]  # fmt: skip
    assert {call[3] for call in runner.calls} == {sampling}
    assert [trace.prompt_id for trace in traces["y"]] == ["a", "b", "c"]


def test_the_warm_up_is_short_and_not_measured():
    runner = ScriptedRunner()
    traces = run_interleaved(runner, ("x", "y"), "onnx-cpu", PROMPTS, PAPER_SAMPLING, 16, ignore)
    assert [(call[0], call[4]) for call in runner.calls[:2]] == [("x", WARM_UP_TOKENS), ("y", WARM_UP_TOKENS)]
    assert all(len(trace.tokens) == 16 for trace in traces["x"])


def test_greedy_texts_are_compared_with_plain_decoding_prompt_by_prompt():
    runner = ScriptedRunner(wrong={("hyco-exact", "b")})
    plain = plain_texts(runner, "torch", PROMPTS, 16, ignore)
    result = check_greedy(runner, "hyco-exact", "torch", PROMPTS, plain, 16, ignore)
    assert (result.prompts, result.backend, result.tokens) == (3, "torch", 48)
    assert [(one.prompt_id, one.position, one.found_token) for one in result.differences] == [("b", 1, -7)]
    assert {call[3] for call in runner.calls} == {GREEDY}


def test_a_shorter_run_is_compared_with_the_beginning_of_the_plain_text():
    runner = ScriptedRunner()
    plain = plain_texts(runner, "torch", PROMPTS, 64, ignore)
    result = check_greedy(runner, "hyco-exact", "qnn", PROMPTS[:1], plain, 8, ignore)
    assert (result.differences, result.tokens) == ((), 8)


def test_progress_counts_prompts():
    seen = []
    run_interleaved(ScriptedRunner(), ("x", "y"), "torch", PROMPTS, PAPER_SAMPLING, 4, lambda *step: seen.append(step))
    assert seen == [("prompts answered by 2 systems", done, 3) for done in (1, 2, 3)]


def test_a_prompt_that_was_not_decoded_plainly_is_an_error():
    with pytest.raises(KeyError):
        check_greedy(ScriptedRunner(), "hyco-exact", "torch", PROMPTS, {"a": (1,)}, 4, ignore)
