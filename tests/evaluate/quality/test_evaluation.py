"""A run over questions: turns behind own answers, failures, and going on after a kill at any place."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.core.data.conversations import Message
from hyco_export.errors import ArtifactError, ProtocolError, UnreachableError
from hyco_export.evaluate.quality.answers import coverage
from hyco_export.evaluate.quality.evaluation import Evaluation, EvaluationPlan, first_prompt_tokens, places
from hyco_export.evaluate.quality.evaluation_folder import Answer, Place, read_answers
from hyco_export.evaluate.quality.prompt_sets import Question, questions_digest
from hyco_export.evaluate.runs import WARM_UP_TOKENS, prompt_seed
from hyco_export.evaluate.traces import TraceStore
from tests.evaluate.synthetic_run import INFO, KEEPSET
from tests.evaluate.synthetic_traces import generation, round_trace
from tests.evaluate.test_bench import PLAN as BENCH_PLAN
from tests.support.words import WordTokenizer

SEED = 5
SYSTEMS = ("cloud-mtp", "hyco")
LONG = " ".join(["word"] * 60)


def question(name: str, *turns: str) -> Question:
    return Question(name, "talk", "talk", tuple((Message("user", text),) for text in turns))


QUESTIONS = (question("a", "one two", "three four"), question("b", "five"), question("c", LONG, "six"))
PLAN = EvaluationPlan(
    **{
        **msgspec.structs.asdict(BENCH_PLAN),
        "systems": SYSTEMS,
        "prompts": ("a", "a/turn2", "b", "c", "c/turn2"),
        "texts": questions_digest(QUESTIONS),
        "seeds": (SEED, SEED + 1),
        "evidence": True,
    },
    prompt_set="talks.jsonl",
)
LIMITED = msgspec.structs.replace(INFO, prompt_limit=40)


class EchoRunner:
    """Answers with the id of a word of the prompt: `hyco` the second, others the third, a generation later the next.

    Stops after `limit` answers as `stop`, and refuses prompts with a word of `refused`.
    """

    def __init__(self, words: WordTokenizer, limit: int = 10**9, stop: type[BaseException] = KeyboardInterrupt) -> None:
        self.words, self.limit, self.stop = words, limit, stop
        self.prompts: list[tuple[str, str, str]] = []
        self.warmed: list[str] = []
        self.refused: set[str] = set()

    def generate(self, system, backend, prompt, sampling, max_new_tokens, repeat=0):  # type: ignore[no-untyped-def]
        if max_new_tokens == WARM_UP_TOKENS:
            self.warmed.append(system)
            return None
        if len(self.prompts) == self.limit:
            raise self.stop("stopped")
        text = self.words.decode(prompt.ids)
        if self.refused & set(text.split()):
            raise ProtocolError("busy", "no place", "come back")
        self.prompts.append((system, prompt.id, text))
        place = (1 if system == "hyco" else 2) + repeat
        made = generation(round_trace((0,)), system=system, prompt_id=prompt.id)
        tokens = (prompt.ids[min(place, len(prompt.ids) - 1)],)
        return msgspec.structs.replace(made, seed=prompt_seed(SEED + repeat, prompt.id), tokens=tokens)


def evaluation(folder: Path, runner: EchoRunner, info=LIMITED, plan=PLAN) -> Evaluation:  # type: ignore[no-untyped-def]
    store = TraceStore(folder, plan, plan.systems)
    return Evaluation(plan, QUESTIONS, runner, info, runner.words, KEEPSET, store)  # type: ignore[arg-type]


def answers(folder: Path, runner: EchoRunner, **options: bool) -> tuple[Answer, ...]:
    return evaluation(folder, runner).run(lambda *_: None, **options)


def test_all_systems_answer_a_question_before_the_next_and_turns_follow_each_other() -> None:
    assert [(p.system, p.question, p.turn) for p in places(SYSTEMS, QUESTIONS[:2], 1)] == [
        ("cloud-mtp", "a", 1), ("cloud-mtp", "a", 2), ("hyco", "a", 1), ("hyco", "a", 2),
        ("hyco", "b", 1), ("cloud-mtp", "b", 1),
    ]  # fmt: skip
    assert len(list(places(SYSTEMS, QUESTIONS, 3))) == 3 * 2 * 5


def test_a_later_turn_stands_behind_the_systems_own_answer(tmp_path: Path) -> None:
    runner = EchoRunner(WordTokenizer())
    rows = answers(tmp_path, runner)
    asked = {(system, name): text for system, name, text in runner.prompts[:4]}
    assert asked["cloud-mtp", "a/turn2"] == "<user> one two <assistant> two <user> three four <answer>"
    assert asked["hyco", "a/turn2"] == "<user> one two <assistant> one <user> three four <answer>"
    second = next(row for row in rows if row.place == Place("hyco", "a", 2, 0))
    assert (second.prompt, second.text, second.prompt_tokens) == ("three four", "one", 9)
    later = next(row for row in rows if row.place == Place("hyco", "a", 1, 1))
    assert later.text == "two"  # another generation, other draws
    assert runner.warmed == list(SYSTEMS)


def test_what_has_no_room_fails_with_its_reason_and_so_do_its_later_turns(tmp_path: Path) -> None:
    rows = answers(tmp_path, EchoRunner(WordTokenizer()))
    failed = {row.place[:3]: row.failure for row in rows if row.failure is not None}
    assert set(failed) == {(system, "c", turn) for system in SYSTEMS for turn in (1, 2)}
    assert (
        failed["hyco", "c", 1]
        == "prompt c has 62 ids, the server takes 40 (shorten the prompt or ask for fewer tokens)"
    )
    assert failed["hyco", "c", 2] == "an earlier turn failed, whose answer belongs into the prompt"
    assert all(row.text == "" and row.tokens == 0 for row in rows if row.failure is not None)
    assert coverage(rows, [row.place for row in rows]) == dict.fromkeys(SYSTEMS, (6, 10))


def test_a_cut_gives_room_and_is_counted(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, truncate=30)
    rows = evaluation(tmp_path, EchoRunner(WordTokenizer()), plan=plan).run(lambda *_: None)
    assert not any(row.failure for row in rows)
    assert {(row.prompt_tokens, row.cut_tokens) for row in rows if row.place[1:3] == ("c", 1)} == {(30, 32)}
    assert first_prompt_tokens(QUESTIONS, WordTokenizer(), None) == [4, 3, 62]  # type: ignore[arg-type]
    assert first_prompt_tokens(QUESTIONS, WordTokenizer(), 30) == [4, 3, 30]  # type: ignore[arg-type]


@pytest.mark.parametrize("finished", range(13))
def test_a_run_stopped_anywhere_ends_with_the_same_rows(tmp_path: Path, finished: int) -> None:
    words = WordTokenizer()
    whole = answers(tmp_path / "whole", EchoRunner(words))
    stopped = EchoRunner(words, limit=finished)
    folder = tmp_path / "stopped"
    if finished < 12:  # so many answers have room
        with pytest.raises(KeyboardInterrupt):
            answers(folder, stopped)
        with (folder / "answers.jsonl").open("ab") as stream:
            stream.write(b'{"system":"half a ro')
    else:
        answers(folder, stopped)
    rest = EchoRunner(words)
    assert answers(folder, rest) == whole == read_answers(folder)
    assert len(stopped.prompts) + len(rest.prompts) == 12
    assert (folder / "answers.jsonl").read_bytes() == (tmp_path / "whole" / "answers.jsonl").read_bytes()
    assert rest.warmed == ([] if finished == 12 else list(SYSTEMS))


def test_a_trace_without_its_row_is_not_made_again(tmp_path: Path) -> None:
    words = WordTokenizer()
    whole = answers(tmp_path, EchoRunner(words))
    (tmp_path / "answers.jsonl").unlink()  # killed between a trace and its row, and more
    again = EchoRunner(words)
    assert answers(tmp_path, again) == whole
    assert again.prompts == []


def test_failures_are_tried_again_only_when_asked(tmp_path: Path) -> None:
    words = WordTokenizer()
    refusing = EchoRunner(words)
    refusing.refused = {"five"}
    rows = answers(tmp_path, refusing)
    assert {row.failure for row in rows if row.question == "b"} == {"busy: no place (come back)"}
    assert answers(tmp_path, EchoRunner(words)) == rows
    retried = EchoRunner(words)
    after = answers(tmp_path, retried, retry_failed=True)
    assert [prompt[1] for prompt in retried.prompts] == ["b"] * 4
    assert [row.text for row in after if row.question == "b"] == ["five", "<answer>", "<answer>", "<answer>"]
    assert answers(tmp_path, EchoRunner(words)) == after == read_answers(tmp_path)


def test_a_server_that_goes_away_ends_the_run_and_is_no_failure(tmp_path: Path) -> None:
    words = WordTokenizer()
    with pytest.raises(UnreachableError):
        answers(tmp_path, EchoRunner(words, limit=3, stop=UnreachableError))
    assert [row.failure for row in read_answers(tmp_path)] == [None] * 3
    assert len(answers(tmp_path, EchoRunner(words))) == 20


def test_a_template_that_refuses_is_a_failure_of_its_question(tmp_path: Path) -> None:
    asked = (question("a", "refuse me"), question("b", "five"))
    runner = EchoRunner(WordTokenizer())
    plan = msgspec.structs.replace(PLAN, texts=questions_digest(asked), prompts=("a", "b"), seeds=(SEED,))
    store = TraceStore(tmp_path, plan, SYSTEMS)
    rows = Evaluation(plan, asked, runner, LIMITED, runner.words, KEEPSET, store).run(lambda *_: None)  # type: ignore[arg-type]
    assert ["such a turn is not taken" in (row.failure or "") for row in rows] == [True, True, False, False]


def test_answers_to_other_questions_are_not_pooled(tmp_path: Path) -> None:
    answers(tmp_path, EchoRunner(WordTokenizer()))
    with pytest.raises(ArtifactError, match="truncate is None there, 30 here"):
        TraceStore(tmp_path, msgspec.structs.replace(PLAN, truncate=30), SYSTEMS)
