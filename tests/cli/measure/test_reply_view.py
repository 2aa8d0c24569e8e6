"""How a reply looks: coloured, marked without colours, and plain."""

import io
import re

import pytest
from rich.console import Console

from hyco_export.cli.measure import reply_view
from hyco_export.cli.measure.reply_view import PlainView, TerminalView, legend, readable, told
from hyco_export.evaluate.chat.reply import SOURCES, Figures, Piece

FIGURES = Figures(2, 7, {"chain": 4, "slm": 1, "bonus": 3}, 250.0, 2000.0, "stop")
SHOW_CURSOR = "\x1b[?25h"
SGR = re.compile(r"\x1b\[([\d;]*)m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def terminal(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> io.StringIO:
    """What a terminal of 60 columns gets."""
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, color_system="standard", no_color=no_color, width=60, legacy_windows=False
    )
    monkeypatch.setattr(reply_view, "output", console)
    return written


def styles(text: str, words: tuple[str, ...]) -> list[str]:
    """The codes that stand right before each word."""
    return [re.findall(rf"(\x1b\[[\d;]*m){word}", text)[-1] for word in words]


def codes(text: str) -> set[int]:
    return {int(code) for found in SGR.findall(text) for code in found.split(";") if code}


def reply(view: TerminalView | PlainView, *pieces: Piece, figures: Figures = FIGURES) -> None:
    with view as shown:
        for piece in pieces:
            shown.show([piece], figures)


def test_every_source_has_a_colour_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, no_color=False)
    reply(TerminalView(), *(Piece(f"word{place} ", source) for place, source in enumerate(SOURCES)))
    found = styles(written.getvalue(), tuple(f"word{place}" for place in range(len(SOURCES))))
    assert len(set(found)) == len(SOURCES) == 5
    assert all(30 <= code < 38 or 90 <= code < 98 for style in found for code in codes(style))


def test_without_colours_sources_have_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, no_color=True)
    reply(TerminalView(), *(Piece(f"word{place} ", source) for place, source in enumerate(SOURCES)))
    reply_view.output.print(legend())
    assert {1, 3, 4, 7} <= codes(written.getvalue()) and max(codes(written.getvalue())) < 30
    marks = {
        name: codes(styles(written.getvalue(), (name,))[0]) for name in ("runner-up", "slm", "bonus", "unverified")
    }
    assert marks == {"runner-up": {4}, "slm": {3}, "bonus": {1}, "unverified": {7}}


def test_finished_lines_stand_once_and_the_figures_below(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, no_color=True)
    reply(TerminalView(), Piece("one\n\ntw", "chain"), Piece("o\nthree", "chain"), Piece(" four", "chain"))
    drawn = SGR.sub("", written.getvalue())
    assert drawn.count("one\n") == 1 and drawn.count("two\n") == 1
    assert drawn.rindex("three four") < drawn.rindex("MAT 3.50") and drawn.replace(SHOW_CURSOR, "").endswith("\n\n")


def test_a_reply_that_was_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    written = terminal(monkeypatch, no_color=True)
    view = TerminalView()
    with view as shown:
        shown.ending()
        shown.show([Piece("half", "chain")], Figures(1, 1, {"chain": 1}, 1.0, 1.0, ""))
    assert "ended by Ctrl-C" in " ".join(SGR.sub("", written.getvalue()).split())


def test_a_pipe_gets_the_text_alone_and_stderr_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    reply(PlainView(), Piece("def f():\n\treturn ", "chain"), Piece("'\x1b[31m'\r", "bonus"))
    told_apart = capsys.readouterr()
    assert told_apart.out == "def f():\n\treturn '\\x1b[31m'\\r\n"
    assert not CONTROL.search(told_apart.out + told_apart.err)
    assert (
        told_apart.err.count("\n") == 1 and "MAT 3.50" in told_apart.err and "chain 4, slm 1, bonus 3" in told_apart.err
    )


def test_figures_without_a_round_say_no_mat() -> None:
    assert told(FIGURES) == (
        "MAT 3.50 · 4.0 tok/s · 8 tokens in 2 rounds · chain 4, slm 1, bonus 3 · first after 0.25 s"
    )
    assert told(Figures(0, 0, {"unverified": 5}, 10.0, 100.0, "length")) == (
        "50.0 tok/s · 5 tokens · unverified 5 · first after 0.01 s · cut at --max-new-tokens"
    )
    assert told(Figures()) == ""


def test_control_characters_are_spelt_out_and_joined_emoji_stay() -> None:
    assert readable("a\x07\x9b\tb\n👨‍👩‍👧") == "a\\x07\\x9b\tb\n👨‍👩‍👧"
