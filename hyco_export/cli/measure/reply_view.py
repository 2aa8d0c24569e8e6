"""How a reply is shown while it grows: coloured by source on a terminal, as plain text elsewhere.

A terminal without colours (NO_COLOR) shows sources by underlining and the like. Where lines cannot be drawn again (a
pipe, a dumb terminal) the text stands alone, without a control character, and the figures go to stderr.
"""

import unicodedata
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from hyco_export.cli.console import output, problems
from hyco_export.core.numerics import MS_PER_S
from hyco_export.errors import counted
from hyco_export.evaluate.chat.reply import SOURCES, UNVERIFIED, Figures, Piece
from hyco_export.evaluate.metrics import BONUS, SOURCE_NAMES
from hyco_export.protocol.tree import Source

CHAIN, RUNNER_UP, SLM = SOURCE_NAMES[Source.CHAIN], SOURCE_NAMES[Source.RUNNER_UP], SOURCE_NAMES[Source.SLM]
COLOURS = {CHAIN: "bright_blue", RUNNER_UP: "yellow", SLM: "green", BONUS: "magenta", UNVERIFIED: "bright_red"}
MARKS = {CHAIN: "not bold", RUNNER_UP: "underline", SLM: "italic", BONUS: "bold", UNVERIFIED: "reverse"}
WAITING = "the server reads the conversation"
TEXT_CONTROLS = "\n\t"  # control characters that belong to a text


class View(Protocol):
    """Shows one reply; a context manager that lasts as long as it grows."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        """What a step brought, and the figures with it."""
        ...

    def ending(self) -> None:
        """The user wants no more: it ends with the call that runs."""
        ...


class TerminalView:
    """A reply with a line of figures below it. Finished lines are printed, the last one is drawn again every step."""

    def __init__(self) -> None:
        self._line = Text()
        self._status = WAITING
        self._ending = False
        self._live = Live(console=output, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._status is WAITING:
            self._status = ""
        self._draw()
        self._live.stop()
        output.print("")

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        for piece in pieces:
            first, *others = readable(piece.text).split("\n")
            self._line.append(first, style_of(piece.source))
            for part in others:
                done, self._line = self._line, Text().append(part, style_of(piece.source))
                self._draw()  # first: what is printed draws the rest once more below
                output.print(done)
        self._status = told(figures)
        if self._ending and not figures.finished:
            self._status += " · ended by Ctrl-C"
        self._draw()

    def ending(self) -> None:
        self._ending = True

    def _draw(self) -> None:
        rows = [self._line] if self._line.plain else []
        self._live.update(Group(*rows, Text(self._status, style="dim")), refresh=True)


class PlainView:
    """A reply as text on stdout, a line of figures on stderr when it ends."""

    def __init__(self) -> None:
        self._figures = Figures()
        self._ending = False
        self._last = "\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._last != "\n":
            self._write("\n")
        if self._figures.tokens:
            ended = " · ended by Ctrl-C" if self._ending and not self._figures.finished else ""
            problems.print(f"[{told(self._figures)}{ended}]", soft_wrap=True)

    def show(self, pieces: Sequence[Piece], figures: Figures) -> None:
        self._figures = figures
        self._write("".join(readable(piece.text) for piece in pieces))

    def ending(self) -> None:
        self._ending = True

    def _write(self, text: str) -> None:
        """Written as it stands: rich would replace tabs."""
        if not text:
            return
        self._last = text[-1]
        try:
            output.file.write(text)
            output.file.flush()
        except BrokenPipeError:
            output.on_broken_pipe()


def view() -> View:
    """What fits where the reply is shown."""
    return TerminalView() if output.shows_bars else PlainView()


def legend() -> Text:
    """Who proposes tokens, each as its tokens are shown."""
    return Text("  ").join([Text("tokens:"), *(Text(source, style_of(source)) for source in SOURCES)])


def style_of(source: str) -> Style:
    """A colour, or a mark where there are no colours."""
    coloured = output.color_system is not None and not output.no_color
    return Style.parse((COLOURS if coloured else MARKS)[source])


def told(figures: Figures) -> str:
    """The figures in one line; nothing before the first token."""
    if not figures.tokens:
        return ""
    mat, speed = figures.mat, figures.tokens_per_s
    parts = [
        f"MAT {mat:.2f}" if mat is not None else "",
        f"{speed:.1f} tok/s" if speed is not None else "",
        counted(figures.tokens, "token") + (f" in {counted(figures.rounds, 'round')}" if figures.rounds else ""),
        ", ".join(f"{source} {count:,}" for source, count in figures.by_source.items() if count),
        f"first after {figures.first_token_ms / MS_PER_S:.2f} s",
        "cut at --max-new-tokens" if figures.finished == "length" else "",
    ]
    return " · ".join(filter(None, parts))


def readable(text: str) -> str:
    """Control characters spelt out, since a model's text must not steer the terminal; lines and tabs stay."""
    return "".join(
        repr(sign)[1:-1] if unicodedata.category(sign) == "Cc" and sign not in TEXT_CONTROLS else sign for sign in text
    )
