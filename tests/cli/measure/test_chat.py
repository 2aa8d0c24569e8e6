"""`chat`: what it answers to a pipe and to somebody who types, what Ctrl-C ends, and what it keeps."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hyco_export.cli.app import app
from hyco_export.cli.console import problems
from hyco_export.cli.measure import chat
from hyco_export.cli.measure.chat import Chat, Interrupts
from hyco_export.cli.measure.reply_view import readable
from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.errors import UnreachableError
from hyco_export.evaluate.page.sources import read_sources
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.models.verifier import load_tokenizer
from hyco_export.protocol import wire
from hyco_export.server.engine import LocalTransport
from hyco_export.server.http import create_app
from hyco_export.stages.run_folder import RunFolder
from tests.cli.test_app import refused
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run, open_small_run
from tests.support import scripted_chat
from tests.support.interrupts import listen_to_interrupts
from tests.support.live_server import running
from tests.support.scripted_chat import HOW, VERIFIER, scripted_conversation
from tests.support.shared import built_once

TOKENIZER = load_tokenizer(VERIFIER)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def piped(
    lines: str, folder: Path, monkeypatch: pytest.MonkeyPatch, at: dict[int, object] | None = None
) -> tuple[int, scripted_chat.ScriptedStarter]:
    """Exit code of a chat whose stdin is a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    conversation, starter = scripted_conversation(at)
    code = Chat(conversation, TOKENIZER.backend_tokenizer, folder, HOW.system, problems).run()
    return code, starter


def own_answers(starter: scripted_chat.ScriptedStarter) -> list[str]:
    """What the model alone says to each question."""
    answers = (starter.server.model.answer(prompt.ids, HOW.max_new_tokens) for prompt in starter.started)
    return [TOKENIZER.decode(tokens, skip_special_tokens=True) for tokens in answers]


def test_a_pipe_gets_replies_on_stdout_and_a_line_of_figures_each_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, starter = piped("What is it?\n\n  And then?  \n", tmp_path, monkeypatch)
    told = capsys.readouterr()
    assert code == 0 and len(starter.started) == 2
    assert told.out == "".join(answer + "\n" * (not answer.endswith("\n")) for answer in own_answers(starter))
    assert [line[:5] for line in told.err.splitlines()] == ["[MAT "] * 2
    assert not CONTROL.search(told.out + told.err)


def test_rounds_are_written_and_named_with_the_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, starter = piped("/rounds\nWhat is it?\nAnd then?\n/rounds\n/quit\nnot read\n", tmp_path, monkeypatch)
    told = " ".join(capsys.readouterr().err.split())
    assert code == 2 and "there are no rounds yet next: ask something first" in told
    (page,) = tmp_path.glob("*/rounds.html")
    assert f"page: {page.resolve()} ({starter.server.rounds} rounds)" in told
    assert f"open: {page.resolve().as_uri()}#rounds/{page.parent.name}/{HOW.system}/question-2/7" in told
    (source,) = read_sources([page.parent])
    assert source.rounds == starter.server.rounds and len(starter.started) == 2
    assert "[MAT" in told and 'id="rounds' in page.read_text()


def test_an_away_server_is_one_line_with_a_next_step_and_the_chat_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = UnreachableError("nobody answers at http://127.0.0.1:9", "start it: hyco-export serve")
    code, starter = piped("What is it?\nAnd then?\n/again\n", tmp_path, monkeypatch, {2: away})
    told = capsys.readouterr()
    assert code == 2  # a script learns that a line was not answered
    assert "error: nobody answers at http://127.0.0.1:9" in told.err and "next: start it: " in told.err
    assert "the conversation is kept: /again asks once more" in " ".join(told.err.split())
    assert len(starter.started) == 3 and told.err.count("[MAT") == 3
    assert starter.started[1].ids[: len(starter.started[0].ids)] == starter.started[0].ids
    assert starter.started[2].ids == starter.started[1].ids


def test_commands_are_listed_and_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, starter = piped("/help\n/runds now\nWhat is it?\n/reset\nAnd then?\n", tmp_path, monkeypatch)
    told = capsys.readouterr().err
    assert code == 0 and all(name in told for name in chat.HINTS) and "K/V are not" in told
    assert "/runds is no command; /help lists them" in told
    whole = encode_prompt(TOKENIZER, [{"role": "user", "content": "And then?"}])
    assert list(starter.started[1].ids) == whole  # nothing of what was said before


def test_ctrl_c_ends_a_reply_and_the_second_in_a_row_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        signal.raise_signal(signal.SIGINT)

    code, starter = piped("One?\nTwo?\nThree?\n", tmp_path, monkeypatch, {2: stop})
    told = capsys.readouterr()
    assert code == 0 and len(starter.started) == 3
    assert [("ended by Ctrl-C" in line) for line in told.err.splitlines()] == [True, False, False]
    assert starter.server.closed == ["session-1", "session-2", "session-3"]
    assert told.out.splitlines()[0] and own_answers(starter)[0].startswith(told.out.splitlines()[0])
    code, starter = piped("One?\nTwo?\nThree?\n", tmp_path, monkeypatch, {2: stop, 3: stop})
    assert code == 130 and len(starter.started) == 2


def test_an_impatient_second_ctrl_c_ends_the_chat_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    before = signal.getsignal(signal.SIGINT)
    code, starter = piped("One?\nTwo?\n", tmp_path, monkeypatch, {1: stop_twice})
    assert code == 130 and len(starter.started) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_noted_once() -> None:
    noted: list[str] = []
    with Interrupts(lambda: noted.append("first")) as interrupts:
        assert not interrupts.seen
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen and noted == ["first"]


def test_ctrl_c_at_a_terminal_ends_the_reply_that_runs_and_not_the_chat(tmp_path: Path) -> None:
    """A process of its own on a pseudo-terminal, whose server hangs in the second round until it is let go."""
    keyboard, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.scripted_chat", str(tmp_path)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.STDOUT,
        env=environment,
        preexec_fn=listen_to_interrupts,
    )
    os.close(terminal)
    seen = Screen(keyboard)
    try:
        os.write(keyboard, b"What is it?\n")
        wait_for(lambda: (tmp_path / "hanging").exists(), process)
        process.send_signal(signal.SIGINT)
        (tmp_path / "go_on").touch()
        seen.until("ended by Ctrl-C")
        os.write(keyboard, b"And then?\n")
        seen.until("cut at --max-new-tokens")
        os.write(keyboard, b"/quit\n")
        seen.until("next: ")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
    assert "\x1b[" in seen.text  # coloured


class Keyboard:
    """A terminal's lines, and Ctrl-C where None stands."""

    def __init__(self, *lines: str | None) -> None:
        self._lines = list(lines)

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        if (line := self._lines.pop(0)) is None:
            raise KeyboardInterrupt
        return line


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        ((None, None), 0),
        (("One?\n", None, "Two?\n", None, None), 2),  # a line in between: it was not twice in a row
        (("One?\n", ""), 1),
        (("One?\n", "/quit\n"), 1),
    ],
)
def test_the_second_ctrl_c_at_the_empty_prompt_ends_the_chat(
    lines: tuple[str | None, ...],
    asked: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keyboard = Keyboard(*lines)
    monkeypatch.setattr(sys, "stdin", keyboard)
    conversation, starter = scripted_conversation()
    assert Chat(conversation, TOKENIZER.backend_tokenizer, tmp_path, HOW.system, problems).run() == 0
    assert len(starter.started) == asked and not keyboard._lines
    hints = capsys.readouterr().err.count("Ctrl-C once more ends the chat")
    assert hints == min(1, lines.count(None)) + (lines.count(None) > 2)


def test_after_a_reply_that_was_ended_one_ctrl_c_at_the_prompt_ends_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard("One?\n", None))
    conversation, _ = scripted_conversation({2: lambda: signal.raise_signal(signal.SIGINT)})
    assert Chat(conversation, TOKENIZER.backend_tokenizer, tmp_path, HOW.system, problems).run() == 0


class Screen:
    """What a pseudo-terminal was sent."""

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard
        self.text = ""
        self._searched = 0

    def until(self, words: str) -> None:
        """Read on to these words, behind which the next search begins; raises OSError where the process is gone."""
        while words not in self.text[self._searched :]:
            assert select.select([self._keyboard], [], [], 60)[0], self.text
            self.text += os.read(self._keyboard, 1 << 16).decode(errors="replace")
        self._searched = self.text.index(words, self._searched) + len(words)


def wait_for(happened: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while not happened():
        assert process.poll() is None, "the chat ended"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--system", "hycoo"), "unknown system 'hycoo'"),
        (("--backend", "npu"), "npu"),
        (("--run", "nowhere"), "run folder nowhere does not exist"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_imported(arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(refused("chat", "--server", "http://127.0.0.1:9", *arguments).split())


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    return open_small_run(built_once(tmp_path_factory, "small-run", build_small_run))


def test_greedy_replies_of_a_real_server_are_its_own(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(small_run.root, small_run.recipe, small_run.root.parent)
    monkeypatch.setattr(chat, "open_run", lambda *_: run)
    engine, info = small_run.serve()
    ids = encode_prompt(small_run.tokenizer, [{"role": "user", "content": "Say it."}])
    plain = Request("plain", "p", wire.Sampling(0.0, 0, 1.0), wire.EXACT, 1, 12)
    tokens = generate(ids, plain, NullDrafter(), LocalTransport(engine, info)).tokens
    with running(create_app(engine, info)) as url:
        options = ("--greedy", "--max-new-tokens", "12", "--system", "hyco-exact")
        done = CliRunner().invoke(app, ["chat", "--server", url, *options], input="Say it.\n/rounds\n")
    assert done.exit_code == 0, done.output
    said = small_run.tokenizer.decode(tokens, skip_special_tokens=True)
    shown = readable(said)  # a model of random weights says anything
    assert done.stdout == shown + "\n" * (not shown.endswith("\n")) and shown.strip()
    (source,) = read_sources(list((small_run.root / "chat").iterdir()))
    assert all(record.evidence for trace in source.traces["hyco-exact"] for record in trace.rounds)
