"""The order of generations, and what is compared with what."""

import pytest

from hyco_export.evaluate.connect import Prompt
from hyco_export.evaluate.runs import GREEDY, WARM_UP_TOKENS, check_greedy, plain_texts, run_interleaved
from hyco_export.protocol.wire import PAPER_SAMPLING
from tests.evaluate.synthetic_traces import generation, round_trace

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
