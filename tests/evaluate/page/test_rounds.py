"""What the viewer is given."""

import base64
import gzip
import json

import msgspec
import pytest
from tokenizers import Tokenizer

from hyco_export.core.files import resource_path
from hyco_export.evaluate.page.rounds import address, packed, viewer_data
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.texts import Texts
from hyco_export.evaluate.quality.evaluation_folder import Score
from hyco_export.evaluate.runs import prompt_seed
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import encode
from tests.evaluate.page.folders import answers
from tests.evaluate.synthetic_traces import generation, local_trace, prime_trace, round_trace

TOKENIZER = Tokenizer.from_file(str(resource_path("hyco_export/dev/tiny/checkpoints/verifier/tokenizer.json")))


def steps_of(trace: GenerationTrace) -> dict:
    data = viewer_data([Source("s", "traces", "s", (_Named(trace.system),), {trace.system: (trace,)})], Texts())
    return data["sources"][0]["systems"][0]["answers"][0]["steps"]


class _Named:
    """What `viewer_data` asks of a system's figures."""

    def __init__(self, system: str) -> None:
        self.system = system


def test_every_token_is_committed_by_one_step(bench: Source) -> None:
    data = viewer_data([bench], Texts())
    checked = 0
    for system in data["sources"][0]["systems"]:
        for answer, trace in zip(system["answers"], bench.traces[system["name"]], strict=True):
            assert sum(answer["steps"]["committed"]) == len(trace.tokens) == len(answer["tokens"])
            assert {len(column) for column in answer["steps"].values()} == {1 + len(trace.rounds)}
            checked += 1
    assert checked == 8


def test_a_round_keeps_its_tree_its_judgement_and_its_times() -> None:
    trace = answers("hyco", 1, 3)[0]
    record, steps = trace.rounds[1], steps_of(trace)
    assert record.evidence is not None
    assert steps["kind"] == ["prime", "round", "round", "round"]
    for column, expected in (
        ("tokens", record.tree.tokens), ("parents", record.tree.parents), ("accepted", record.accepted),
        ("sources", record.tree.sources), ("drawn", record.drawn), ("draws", record.evidence.draws),
    ):  # fmt: skip
        assert list(steps[column][2]) == list(expected)
    assert steps["probs"][2] == pytest.approx(record.evidence.probs, rel=1e-3)
    assert steps["server"][2] == pytest.approx(record.server_ms, abs=1e-3)


def test_the_bytes_of_a_reply_are_without_what_only_traces_need() -> None:
    trace = answers("hyco", 1, 1)[0]
    record = trace.rounds[0]
    assert record.evidence is not None
    asked_for = len(encode(record.evidence)) - 1
    assert steps_of(trace)["down"][1] == record.traffic.payload_down_bytes - asked_for


def test_a_chain_that_the_server_drafted_is_a_tree_of_the_head() -> None:
    steps = steps_of(answers("cloud-mtp", 1, 1)[0])
    assert steps["parents"][1] == [-1, 0, 1, 2] and list(steps["sources"][1]) == [0, 0, 0, 0]


def test_a_path_that_was_cut_shows_only_what_was_committed() -> None:
    cut = round_trace((0, 1, 2), tokens=(10, 11), finished="length")
    steps = steps_of(generation(cut))
    assert list(steps["accepted"][1]) == [0, 1] and steps["committed"][1] == 2


def test_unverified_tokens_and_disturbed_calls_are_steps_of_their_own_kind() -> None:
    kept = local_trace((7, 8))
    steps = steps_of(generation(round_trace((0,), kept=(7, 8), lost_ms=12.5), locals=(kept,), primes=(prime_trace(),)))
    assert steps["kind"] == ["prime", "local", "round"]
    assert steps["committed"] == [1, 2, 2] and steps["kept"] == [0, 0, 2]
    assert steps["lost"] == [None, None, 12.5] and list(steps["accepted"][1]) == [0, 1]
    assert steps["up"][1] == 0 and steps["probs"][2] == []


def test_an_evaluations_answers_have_prompt_task_and_scores(evaluation: Source) -> None:
    hyco = viewer_data([evaluation], Texts())["sources"][0]["systems"][1]
    assert (hyco["answers"][0]["prompt"], hyco["answers"][0]["task"]) == ("What is q0?", "qa")
    assert hyco["answers"][0]["scores"] == [["judge", 87.5, ""]] and hyco["answers"][1]["scores"] == []
    assert hyco["failures"] == [["q9", "went away"]]


def test_packed_data_come_out_as_they_went_in_and_are_small(bench: Source) -> None:
    data = viewer_data([bench], Texts())
    text = packed(data)
    assert packed(data) == text
    assert json.loads(gzip.decompress(base64.b64decode(text))) == json.loads(json.dumps(data, default=list))
    assert len(text) < 700 * bench.rounds  # of 32 nodes


def test_of_too_many_rounds_every_nth_answer_is_held(bench: Source) -> None:
    data = viewer_data([bench], Texts(), most=bench.rounds // 2)
    held = [[one["id"] for one in system["answers"]] for system in data["sources"][0]["systems"]]
    assert data["every"] == 2 and held == [["q0", "q2"], ["q0", "q2"]]
    assert viewer_data([bench], Texts())["every"] == 1


def test_an_address_has_no_sign_that_parts_it() -> None:
    assert address("tiny/bench", "hyco", "q1/turn2", 7, 3) == "#rounds/tiny%2Fbench/hyco/q1%2Fturn2/7/3"


def test_generations_with_the_same_text_keep_their_own_scores(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    trace = evaluation.traces["hyco"][0]
    first = next(one for one in evaluation.evaluation.answers if one.place[:2] == ("hyco", trace.prompt_id))
    both = (first, msgspec.structs.replace(first, generation=1))
    scores = tuple(Score(*one.place, "judge", 10.0 * one.generation) for one in both)
    again = msgspec.structs.replace(trace, seed=prompt_seed(8, trace.prompt_id))
    source = msgspec.structs.replace(
        evaluation,
        evaluation=msgspec.structs.replace(evaluation.evaluation, answers=both, scores=scores),
        plan={"seeds": [7, 8]},
        traces={"hyco": (msgspec.structs.replace(trace, seed=prompt_seed(7, trace.prompt_id)), again)},
    )
    shown = viewer_data([source], Texts())["sources"][0]["systems"][0]["answers"]
    assert [(one["generation"], one["scores"]) for one in shown] == [
        (0, [["judge", 0.0, ""]]),
        (1, [["judge", 10.0, ""]]),
    ]
