"""What `chat` does: meet the server, open the device, and answer line by line, until the input ends."""

import io
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from hyco_export.cli.connection import ConnectOptions, direct_transport
from hyco_export.cli.console import LiteralConsole, output, problems, show_error, show_next
from hyco_export.cli.invocation import INTERRUPTED, command_line
from hyco_export.cli.measure.report import next_command
from hyco_export.cli.options import open_run, require_built
from hyco_export.cli.validation import subject_of
from hyco_export.device.backends import find_backend
from hyco_export.device.systems import find_system
from hyco_export.errors import HycoError, counted
from hyco_export.stages.run_folder import RunFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hyco_export.evaluate.chat.conversation import Conversation
    from hyco_export.evaluate.connect import Connection
    from hyco_export.evaluate.page.sources import Source
    from hyco_export.evaluate.runs import DeviceRunner

CHAT_FOLDER, PAGE_FILE = "chat", "rounds.html"  # in a run folder, one folder a conversation
NAME_FORMAT = "%Y-%m-%d-%H%M%S"
MARK = "> "  # before what a user types
QUIT = "/quit"
HINTS = {
    "/rounds": "write the page with every round of this conversation, and say where it is",
    "/again": "ask the last question once more, with other draws",
    "/reset": "begin a new conversation",
    "/help": "this list",
    QUIT: "end, as Ctrl-D does",
}
TURNS = (
    "Every turn sends the whole conversation as a new prompt: messages are kept from turn to turn, K/V are not. "
    "Ctrl-C ends a reply; once more, at the empty prompt, it ends the chat."
)
AFTER_FAILURE = "the conversation is kept: /again asks once more, /reset begins a new one"


class ChatOptions(msgspec.Struct, frozen=True):
    """What the command line says; None where the recipe's validation decides."""

    system: str = "hyco"
    backend: str = "onnx-cpu"
    max_new_tokens: int | None = None
    seed: int | None = None
    greedy: bool = False
    evidence: bool = True  # ask for p~, which the page of rounds shows


def chat_run(
    server: str,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    options: ChatOptions,
    connecting: ConnectOptions,
) -> int:
    """Chat until the input ends; 0, 2 where a line of a pipe was not answered, or 130 after Ctrl-C.

    Raises:
        HycoError: no such system or back end, a run that is not built, or a server that is away or not this run's.
    """
    find_system(options.system)
    find_backend(options.backend)
    notes = output if output.shows_bars else problems  # a pipe gets the replies alone
    run = open_run(recipe_path, run_dir, target, notes)
    run.recipe.models.require_head()
    require_built(run)
    transport = direct_transport(server, connecting)
    transport.info()  # a dead URL is said at once, before any file is hashed

    from hyco_export.evaluate.connect import connect
    from hyco_export.evaluate.runs import DeviceRunner

    connection = connect(subject_of(run), server, transport)
    recipe = run.recipe
    if options.seed is not None:
        drawn = msgspec.structs.replace(recipe.validation, seed=options.seed)
        recipe = msgspec.structs.replace(recipe, validation=drawn)
    device = DeviceRunner(connection.artifacts, recipe, transport, connection.info, trace=options.evidence)
    with device as runner:
        _open_device(runner, options)
        conversation = _conversation(run, options, connection, runner)
        chat = Chat(conversation, connection.tokenizer.backend_tokenizer, run.root / CHAT_FOLDER, options.system, notes)
        if chat.is_shown:
            _greet(run, server, options)
        return chat.run()


def _open_device(runner: "DeviceRunner", options: ChatOptions) -> None:
    """Open it so that Ctrl-C does not reach its processes (`qnn`): a child ignores what its parent ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner.prepare(options.system, options.backend)
    finally:
        signal.signal(signal.SIGINT, before)


def _conversation(
    run: RunFolder, options: ChatOptions, connection: "Connection", runner: "DeviceRunner"
) -> "Conversation":
    from hyco_export.evaluate.chat.conversation import Conversation, How
    from hyco_export.evaluate.connect import wire_sampling
    from hyco_export.evaluate.runs import GREEDY

    sampling = GREEDY if options.greedy else wire_sampling(run.recipe)
    limit = options.max_new_tokens or run.recipe.validation.max_new_tokens
    return Conversation(runner, How(options.system, options.backend, sampling, limit), connection.tokenizer)


def _greet(run: RunFolder, server: str, options: ChatOptions) -> None:
    from hyco_export.cli.measure.reply_view import legend

    system = find_system(options.system)
    output.print(f"verifier: {run.recipe.models.verifier.model} at {server}", soft_wrap=True)
    output.print(f"system: {system.name}, {system.summary}; device back end {options.backend}", soft_wrap=True)
    output.print(legend())
    output.print("/help tells the commands", style="dim")


class Chat:
    """Lines in, replies out.

    Args:
        tokenizer: the verifier's.
        folder: conversations whose rounds are looked at are kept below it.
        system: whose traces they are.
        notes: where everything is said that is no reply.
    """

    def __init__(
        self, conversation: "Conversation", tokenizer: "Tokenizer", folder: Path, system: str, notes: LiteralConsole
    ) -> None:
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._folder = folder
        self._system = system
        self._notes = notes
        self._typed = sys.stdin.isatty()
        self._begun = datetime.now()
        self._interrupted = False  # was Ctrl-C the last thing that happened
        self._failed = False
        self._sources: tuple[Source, ...] = ()  # of the page that was written last
        if self._typed:
            import readline  # noqa: F401  # input() then takes arrow keys and knows earlier lines
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    @property
    def is_shown(self) -> bool:
        """Does a user see what is beside the replies."""
        return self._notes is output

    def run(self) -> int:
        """Until the input ends, or Ctrl-C comes twice in a row; the exit code."""
        try:
            while self._goes_on():
                pass
        except KeyboardInterrupt:
            if not self._typed:
                return INTERRUPTED
        if self._typed and self.is_shown:
            show_next(next_command(self._sources) if self._sources else command_line("bench"))
        return HycoError.exit_code if self._failed and not self._typed else 0

    def _goes_on(self) -> bool:
        """Do what one line says; is there more to come.

        Raises:
            KeyboardInterrupt: the second in a row, or one while a pipe is waited for.
        """
        try:
            line = self._read()
            if line is not None:
                self._do(line.strip())
            return line is not None and line.strip() != QUIT
        except KeyboardInterrupt:
            self._notes.print("")
            if self._interrupted or not self._typed:
                raise
            self._interrupted = True
            self._notes.print("Ctrl-C once more ends the chat", style="dim")
            return True

    def _do(self, line: str) -> None:
        if self._typed:
            self._interrupted = False
        commands = {"/rounds": self._rounds, "/again": self._again, "/reset": self._reset, "/help": self._help}
        if line in commands:
            self._guarded(commands[line])
        elif line.startswith("/") and line != QUIT:
            self._notes.print(f"{line.split()[0]} is no command; /help lists them", soft_wrap=True)
        elif line and line != QUIT:
            self._guarded(partial(self._ask, line))

    def _read(self) -> str | None:
        """A line; None at the end of the input. A line that Ctrl-C drops was no empty prompt."""
        if self._typed and sys.stdout.isatty():
            try:
                return input(MARK)
            except EOFError:
                self._notes.print("")
                return None
            except KeyboardInterrupt:
                self._interrupted = self._interrupted and not _half_line()
                raise
        line = sys.stdin.readline()
        if line.strip() and self.is_shown:
            self._notes.print(f"{MARK}{line.strip()}", soft_wrap=True)
        return line or None

    def _guarded(self, work: Callable[[], None]) -> None:
        """What cannot be done is one line; the chat goes on."""
        try:
            work()
        except HycoError as error:
            self._failed = True
            show_error(error)
            self._notes.print(AFTER_FAILURE, style="dim", soft_wrap=True)

    def _ask(self, question: str) -> None:
        self._reply(lambda show, is_ended: self._conversation.ask(question, show, is_ended))

    def _again(self) -> None:
        self._reply(self._conversation.ask_again)

    def _reply(self, ask: Callable[..., object]) -> None:
        """Show a reply. Ctrl-C ends it; the second in a row ends the chat.

        Raises:
            KeyboardInterrupt: that second one.
        """
        from hyco_export.cli.measure.reply_view import view

        before = self._interrupted
        with view() as shown, Interrupts(shown.ending) as interrupts:
            try:
                ask(shown.show, lambda: interrupts.seen)
            finally:
                self._interrupted = interrupts.seen
        if before and self._interrupted:
            raise KeyboardInterrupt

    def _reset(self) -> None:
        self._conversation.reset()
        self._begun = datetime.now()
        self._notes.print("a new conversation", style="dim")

    def _help(self) -> None:
        for name, meaning in HINTS.items():
            self._notes.print(f"{name:9}{meaning}", soft_wrap=True)
        self._notes.print(TURNS, style="dim")

    def _rounds(self) -> None:
        """Write traces and page, and name them.

        Raises:
            HycoError: there are no rounds yet, or the files cannot be written.
        """
        if not self._conversation.rounds:
            raise HycoError("there are no rounds yet", "ask something first")
        from hyco_export.core.files import storage_errors
        from hyco_export.evaluate.page.page import write_page
        from hyco_export.evaluate.page.rounds import address
        from hyco_export.evaluate.page.sources import read_sources
        from hyco_export.evaluate.page.texts import Texts
        from hyco_export.evaluate.traces import write_traces

        folder = self._folder / self._begun.strftime(NAME_FORMAT)
        traces = self._conversation.traces
        with storage_errors(folder):
            write_traces(folder / f"{self._system}.jsonl", traces)
        self._sources = read_sources([folder])
        page = (folder / PAGE_FILE).resolve()
        write_page(self._sources, Texts(self._tokenizer, self._conversation.questions), page)
        last = address(self._sources[0].name, self._system, traces[-1].prompt_id, traces[-1].seed)
        self._notes.print(f"page: {page} ({counted(self._sources[0].rounds, 'round')})", soft_wrap=True)
        self._notes.print(f"open: {page.as_uri()}{last}", soft_wrap=True)


def _half_line() -> str:
    """What is typed of a line that was interrupted."""
    import readline

    return readline.get_line_buffer()


class Interrupts:
    """In the block the first Ctrl-C is only noted, so that no call is cut in two; a second one raises."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self.seen = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
        self._on_first()
