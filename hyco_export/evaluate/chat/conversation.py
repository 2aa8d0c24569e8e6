"""A conversation of several turns: each question is answered in a session of its own, by the device's driver.

Both sides keep the messages: a turn's prompt is the chat template over all of them. K/V are not kept from turn to turn,
since the template may write an earlier answer otherwise than it was drawn: the server processes the prompt anew.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from hyco_export.core.data.conversations import ASSISTANT_ROLES, USER_ROLE, Message
from hyco_export.device.driver import Generation
from hyco_export.errors import HycoError
from hyco_export.evaluate.chat.reply import Figures, Piece, Reply
from hyco_export.evaluate.connect import Prompt
from hyco_export.evaluate.quality.prompt_fitting import fit_prompt
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Show = Callable[[Sequence[Piece], Figures], None]


class Starter(Protocol):
    """Begins generations; `runs.DeviceRunner`."""

    def start(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> Generation: ...

    def require_same_server(self) -> None: ...


class How(msgspec.Struct, frozen=True):
    """How every question is answered."""

    system: str
    backend: str
    sampling: Sampling
    max_new_tokens: int


class Conversation:
    """What was said so far, and the record of it.

    Attributes:
        messages: questions and answers; a question without an answer is not among them.
        questions: text of every question that was asked, by the id of its prompt.
        traces: of all replies, those that were ended or failed too.
    """

    def __init__(self, runner: Starter, how: How, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._runner = runner
        self._how = how
        self._tokenizer = tokenizer
        self._outage = False  # was a call lost since the server was last known to be the same
        self._before: tuple[Message, ...] = ()  # messages before the last question
        self.messages: tuple[Message, ...] = ()
        self.questions: dict[str, str] = {}
        self.traces: list[GenerationTrace] = []

    @property
    def rounds(self) -> int:
        """Recorded steps that a page can show."""
        return sum(len(trace.rounds) + len(trace.locals) for trace in self.traces)

    def ask(self, question: str, show: Show, is_ended: Callable[[], bool]) -> Figures:
        """Let the question be answered; what was said of an answer that ends early stays.

        Args:
            show: called after every step with the text that it brought.
            is_ended: asked before every step: does the user want no more.

        Raises:
            HycoError: the server is away or refuses, another one answers, or the chat template refuses the question.
                The conversation is as before, with what there was of an answer.
        """
        self._before = self.messages
        name = f"question-{len(self.questions) + 1}"
        self.questions[name] = question
        if self._outage:
            self._runner.require_same_server()
            self._outage = False
        prompt = fit_prompt(self._tokenizer, (*self.messages, Message(USER_ROLE, question)), None)
        how = self._how
        generation = self._runner.start(
            how.system, how.backend, Prompt(name, prompt.ids), how.sampling, how.max_new_tokens
        )
        reply = Reply(self._tokenizer.backend_tokenizer)
        try:
            self._follow(generation, reply, show, is_ended)
        except HycoError:
            self._outage = True
            raise
        finally:
            generation.close()
            self._keep(question, generation.trace())
        return reply.figures

    def _follow(self, generation: Generation, reply: Reply, show: Show, is_ended: Callable[[], bool]) -> None:
        while not generation.finished and not is_ended():
            try:
                generation.step()
            finally:  # tokens that the device kept are there before the call that fails
                pieces = reply.follow(generation.trace())
                show(pieces, reply.figures)
        show(reply.end(), reply.figures)

    def _keep(self, question: str, trace: GenerationTrace) -> None:
        self._outage = self._outage or bool(trace.disturbed)
        if not trace.tokens:
            return
        self.traces.append(trace)
        said = str(self._tokenizer.decode(list(trace.tokens), skip_special_tokens=True))
        self.messages = (*self._before, Message(USER_ROLE, question), Message(ASSISTANT_ROLES[0], said))

    def ask_again(self, show: Show, is_ended: Callable[[], bool]) -> Figures:
        """Ask the last question once more, with other draws; the new answer takes the place of the old one.

        Raises:
            HycoError: nothing was asked yet; or as `ask`, and then an old answer stays where there is no new one.
        """
        if not self.questions:
            raise HycoError("nothing was asked yet", "type a question")
        kept, answered = self.messages, len(self.traces)
        self.messages = self._before
        try:
            return self.ask(list(self.questions.values())[-1], show, is_ended)
        finally:
            if len(self.traces) == answered:
                self.messages = kept

    def reset(self) -> None:
        """Begin a new conversation: nothing that was said is known any more."""
        self._before, self.messages = (), ()
        self.questions.clear()
        self.traces.clear()
