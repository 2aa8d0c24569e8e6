"""What the terminal shows: progress of stages, tables of metrics, errors.

Whatever is printed for the user to read goes through `output` or `problems`. Text that names commands of this program
goes through `say`, `complain` or `show_error`, which complete them with the places of this call.
"""

import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from hyco_export.cli.invocation import completed, is_launched, is_main
from hyco_export.errors import HycoError

if TYPE_CHECKING:
    from hyco_export.core.estimates.stages import Estimate
    from hyco_export.stages.forecast import Forecast

OUTPUT_CLOSED = 141  # what a shell shows for a program that SIGPIPE ended


class LiteralConsole(Console):
    """A console that prints every text as it stands, since paths and names of users are in it: no markup, no emoji
    codes, no highlighting. What is to have a style is a `Text`.

    Its reader may leave, as `head` does: rich would end with 1, which says that a gate failed.
    """

    def __init__(self, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_printable(text), **options)

    @property
    def shows_bars(self) -> bool:
        """Can lines be drawn again: asked of the stream itself, for FORCE_COLOR makes rich call a pipe a terminal."""
        return self.file.isatty() and self.is_interactive and not self.quiet

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(OUTPUT_CLOSED) from None


output = LiteralConsole(quiet=not is_main())  # the main process speaks for all
problems = LiteralConsole(stderr=True)
DIGEST = re.compile("[0-9a-f]{64}")
SHOWN_DIGEST = 16  # enough to compare by eye
PLAIN_INTERVAL_S = 10.0  # without a terminal, a running step reports this often


class ConsoleProgress:
    """Shows steps as bars on a terminal, as sparse lines elsewhere. Use as a context manager.

    When it ends, every clock stops, and a bar that is not full says why.
    """

    def __init__(self) -> None:
        label = Column(ratio=3, no_wrap=True, overflow="ellipsis")  # it gives way on a narrow terminal, counts do not
        self._bars = Progress(
            TextColumn("  {task.description}", markup=False, table_column=label),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=output,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = 0.0

    def __enter__(self) -> "ConsoleProgress":
        if output.shows_bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed" if error else "ended early"
        for task in self._bars.tasks:
            if not task.finished:
                self._bars.stop_task(task.id)
                self._bars.update(task.id, description=f"{end}: {task.description}")
        if self._bars.live.is_started:  # elsewhere rich would print an empty line
            self._bars.stop()

    def step(self, label: str, done: int, total: int) -> None:
        if output.shows_bars:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=total)
            elif self._bars.tasks[self._bars.task_ids.index(self._tasks[label])].completed > done:
                self._bars.reset(self._tasks[label])  # the same work once more, for another system
            self._bars.update(self._tasks[label], completed=done, total=total)
        elif done == total or time.monotonic() - self._last_line_s > PLAIN_INTERVAL_S:
            self._last_line_s = time.monotonic()
            output.print(f"  {label}: {done}/{total}", soft_wrap=True)

    def note(self, text: str) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        output.print(text, soft_wrap=True)


def show_metrics(title: str, metrics: Mapping[str, Any]) -> None:
    """Plain values as one list of names and values; then each table of rows (a mapping of mappings or sequences).

    What is nested deeper is left to the manifest.
    """
    plain = {name: value for name, value in metrics.items() if not _is_table(value)}
    grid = _grid(title)
    for name, value in plain.items():
        grid.add_row(name, format_value(value))
    output.print(grid, crop=False)
    for name, rows in metrics.items():
        if _is_table(rows):
            show_rows(name, rows)


def show_next(command: str) -> None:
    """The command to go on with, as it can be copied: on a line of its own."""
    output.print(f"\nnext: {command}", soft_wrap=True)


def show_rows(title: str, rows: Mapping[str, Any]) -> None:
    """One line a row, or one column a row where that is narrower."""
    output.print(_row_table(title, rows), crop=False)


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(row, Mapping) or _is_list(row) for row in value.values())
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _row_table(title: str, rows: Mapping[str, Any]) -> Table:
    """Rows by columns, the longer side downwards; columns are the rows' names, or 1, 2, ... (depths) for sequences."""
    cells = {name: dict(enumerate(row, 1)) if _is_list(row) else row for name, row in rows.items()}
    columns = [key for key, value in next(iter(cells.values())).items() if not isinstance(value, Mapping)]
    lines = [[name, *(format_value(row.get(key, "")) for key in columns)] for name, row in cells.items()]
    grid = [["", *map(str, columns)], *lines]
    if len(columns) > len(cells):
        grid = [list(line) for line in zip(*grid, strict=True)]
    table = _grid(f"\n{title}", header=True)
    for position, head in enumerate(grid[0]):
        table.add_column(head, justify="right" if position else "left", no_wrap=True)
    for line in grid[1:]:
        table.add_row(*line)
    return table


def _grid(title: str, header: bool = False) -> Table:
    from hyco_export.evaluate.summary import WholeTable  # heavy: after the work

    return WholeTable(title, show_header=header)


def format_value(value: Any) -> str:
    """A number with four significant digits, a digest's beginning, a list or mapping of them, or the value's text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "  ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if _is_list(value):
        return "  ".join(format_value(item) for item in value)
    text = str(value)
    return text[:SHOWN_DIGEST] if DIGEST.fullmatch(text) else text


def show_error(error: HycoError) -> None:
    """One line, and the next step; in a launch of several processes from the first that fails."""
    if is_launched():
        from hyco_export.models.process_group import first_to_fail

        if not first_to_fail():
            return
    problems.print(Text.assemble(("error:", "bold red"), f" {_printable(error.message)}"), soft_wrap=True)
    if error.hint:
        problems.print(Text.assemble(("  next:", "dim"), f" {_printable(completed(error.hint))}"), soft_wrap=True)


def say(text: str) -> None:
    """A line on stdout, its commands completed with the places of this call."""
    output.print(completed(text), soft_wrap=True)


def complain(text: str) -> None:
    """The same on stderr."""
    problems.print(completed(text), soft_wrap=True)


def _printable(text: str) -> str:
    """Control characters spelt out: a server's refusal or a file's name must not steer the terminal."""
    return "".join(repr(sign)[1:-1] if unicodedata.category(sign)[0] == "C" and sign != "\n" else sign for sign in text)


def show_forecast(forecast: "Forecast") -> None:
    """One line a stage: what happens and what it takes; then what is missing and what was assumed."""
    table = _grid("plan", header=True)
    table.add_column("stage")
    table.add_column("what happens")
    for column in ("tokens", "disk", "memory", "binaries"):
        table.add_column(column, justify="right", no_wrap=True)
    for item in forecast.stages:
        happens = "fresh, reused" if item.fresh else f"build: {item.reason}"
        table.add_row(item.stage.name, happens, *_estimate_cells(item.estimate))
    output.print(table, crop=False)
    for line in forecast.missing:
        output.print(f"missing: {line}", soft_wrap=True)
    for line in forecast.remarks:
        output.print(f"note: {line}", soft_wrap=True)
    for line in forecast.notes:
        output.print(f"assumed: {line}", soft_wrap=True)
    output.print(f"artifacts: {forecast.stages[0].folder.parent}", soft_wrap=True)


def _estimate_cells(estimate: "Estimate | None") -> list[str]:
    if estimate is None:
        return ["?", "?", "?", ""]
    sizes = (estimate.disk_bytes, estimate.ram_bytes, estimate.binary_bytes)
    return [f"{estimate.tokens:,}" if estimate.tokens else "", *(format_bytes(size) if size else "" for size in sizes)]


def format_bytes(size: int) -> str:
    """Decimal units, three digits: 365 MB."""
    for unit, value in (("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)):
        if size >= value:
            return f"{size / value:.{2 if size < 10 * value else 1 if size < 100 * value else 0}f} {unit}"
    return f"{size} B"
