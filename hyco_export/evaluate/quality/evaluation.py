"""Systems answer a set's questions, turn by turn; a run that was killed goes on with the answer it was at.

A later turn's prompt holds the system's own earlier answers. A generation that the server refuses, or whose prompt has
no room, is a failure with its reason; when the server goes away the run ends, and the same command goes on.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hyco_export.core.data.conversations import Message
from hyco_export.core.keepset import KeepSet
from hyco_export.device.systems import find_system
from hyco_export.errors import CheckpointError, HycoError, ProtocolError, RecipeError, ServerError
from hyco_export.evaluate.bench import BenchPlan
from hyco_export.evaluate.connect import OnStep, Prompt, require_room
from hyco_export.evaluate.quality.answers import AnswerFile, answer_of, failed_answer
from hyco_export.evaluate.quality.evaluation_folder import Answer, Place
from hyco_export.evaluate.quality.prompt_fitting import FittedPrompt, fit_prompt
from hyco_export.evaluate.quality.prompt_sets import Question
from hyco_export.evaluate.runs import SystemRunner, prompt_seed, turns, warm_up
from hyco_export.evaluate.traces import TraceStore
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import ServerInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASSISTANT = "assistant"


class EvaluationPlan(BenchPlan, frozen=True):
    """A benchmark's plan over a set of questions; `texts` is the digest of everything that is asked."""

    prompt_set: str = ""
    truncate: int | None = None  # ids of a prompt, at most


def places(systems: Sequence[str], questions: Sequence[Question], generations: int) -> Iterator[Place]:
    """All answers in the order in which they are made: all systems answer a question before the next one comes."""
    for generation in range(generations):
        for system, question in turns(systems, questions):
            for turn in range(1, len(question.turns) + 1):
                yield Place(system, question.id, turn, generation)


def turn_messages(question: Question, turn: int, answers: Sequence[str]) -> tuple[Message, ...]:
    """What the verifier reads before it answers `turn` (from 1): all messages so far, the system's answers between."""
    messages = list(question.turns[0])
    for answer, asked in zip(answers[: turn - 1], question.turns[1:turn], strict=True):
        messages += [Message(ASSISTANT, answer), *asked]
    return tuple(messages)


def first_prompt_tokens(
    questions: Sequence[Question], tokenizer: "PreTrainedTokenizerFast", limit: int | None
) -> list[int]:
    """Ids of every question's first prompt."""
    return [len(fit_prompt(tokenizer, question.turns[0], limit).ids) for question in questions]


class Evaluation:
    """One run over one folder.

    Args:
        plan: what is run; its seeds are consecutive and start with the runner's own.
        questions: in the plan's order.
        runner: draws with its own seed + generation.
        info: the server's limits.
        tokenizer: the verifier's.
        keepset: the run's.
        store: the folder's traces.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        questions: Sequence[Question],
        runner: SystemRunner,
        info: ServerInfo,
        tokenizer: "PreTrainedTokenizerFast",
        keepset: KeepSet,
        store: TraceStore,
    ) -> None:
        self._plan = plan
        self._questions = {question.id: question for question in questions}
        self._runner = runner
        self._info = info
        self._tokenizer = tokenizer
        self._keepset = keepset
        self._store = store
        self.places = tuple(places(plan.systems, questions, len(plan.seeds)))
        self._file = AnswerFile(store.folder, self.places)

    def run(self, on_step: OnStep, retry_failed: bool = False) -> tuple[Answer, ...]:
        """Make the answers that the folder does not hold; all of them, in the plan's order.

        Raises:
            ServerError: the server went away, or another one came back; what is finished stays.
        """
        failures = {} if retry_failed else self._file.failures()
        self._file.replace(self._known(failures))
        todo = [place for place in self.places if place not in self._file.rows]
        if todo:
            self._warm_up(todo)
        for done, place in enumerate(todo, len(self.places) - len(todo) + 1):
            self._file.add(self._answer(place))
            on_step("answers", done, len(self.places))
        self._file.replace(self._file.rows.values())
        return tuple(self._file.rows[place] for place in self.places)

    def _known(self, failures: dict[Place, Answer]) -> list[Answer]:
        """Rows of what is finished, made from the traces again, and of known failures."""
        traces = {
            (trace.system, trace.prompt_id, trace.seed): trace
            for system in self._plan.systems
            for trace in self._store.traces(system)
        }
        rows: dict[Place, Answer] = {}
        for place in self.places:
            trace = traces.get((place.system, *self._drawn(place)))
            if trace is not None:
                self._file.rows = rows  # of the earlier turns, which the prompt holds
                rows[place] = self._row(place, self._prompt(place), trace)
            elif place in failures:
                rows[place] = failures[place]
        return list(rows.values())

    def _drawn(self, place: Place) -> tuple[str, int]:
        """Name of the prompt, and the seed of its draws."""
        name = place.prompt_id
        return name, prompt_seed(self._plan.seeds[place.generation], name)

    def _prompt(self, place: Place) -> FittedPrompt:
        """Raises RecipeError, CheckpointError: the chat template refuses it, or it cannot be cut so far."""
        question = self._questions[place.question]
        earlier = [self._file.rows[place._replace(turn=turn)].text for turn in range(1, place.turn)]
        return fit_prompt(self._tokenizer, turn_messages(question, place.turn, earlier), self._plan.truncate)

    def _row(self, place: Place, prompt: FittedPrompt, trace: GenerationTrace) -> Answer:
        text = str(self._tokenizer.decode(list(trace.tokens), skip_special_tokens=True))
        return answer_of(place, self._questions[place.question], prompt, trace, text, self._keepset)

    def _answer(self, place: Place) -> Answer:
        question = self._questions[place.question]
        if any(self._file.rows[place._replace(turn=turn)].failure is not None for turn in range(1, place.turn)):
            return failed_answer(place, question, "an earlier turn failed, whose answer belongs into the prompt")
        try:
            prompt = self._with_room(place)
        except (RecipeError, CheckpointError, ServerError) as refusal:
            return failed_answer(place, question, _told(refusal))
        try:
            trace = self._generate(place, prompt)
        except ProtocolError as refusal:
            return failed_answer(place, question, f"{refusal.code}: {_told(refusal)}")
        self._store.add(trace)
        return self._row(place, prompt, trace)

    def _with_room(self, place: Place) -> FittedPrompt:
        """Raises ServerError: the server has no room for the prompt and its answer; others as `_prompt`."""
        prompt = self._prompt(place)
        if find_system(place.system).asks:
            name = place.prompt_id
            require_room(self._info, name, len(prompt.ids), self._plan.max_new_tokens)
        return prompt

    def _generate(self, place: Place, prompt: FittedPrompt) -> GenerationTrace:
        asked = Prompt(place.prompt_id, prompt.ids)
        plan = self._plan
        return self._runner.generate(
            place.system, plan.backend, asked, plan.sampling, plan.max_new_tokens, place.generation
        )

    def _warm_up(self, todo: Sequence[Place]) -> None:
        """One round of every part on the first prompt that has room; the baseline asks a server."""
        for place in todo:
            first = place._replace(system=self._plan.systems[0], turn=1)
            try:
                prompt = self._with_room(first)
            except HycoError:
                continue  # it becomes a failure when its turn comes
            asked = Prompt(place.question, prompt.ids)
            warm_up(self._runner, self._plan.systems, self._plan.backend, asked, self._plan.sampling)
            return


def _told(refusal: HycoError) -> str:
    """In one line."""
    return " ".join(str(refusal).split())
