"""What the command line prints to go on with works as it stands, and texts of users are printed as they stand."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from hyco_export.cli import app, console, invocation
from hyco_export.cli.invocation import command_line, completed, told
from hyco_export.core.recipe_loading import embedded_recipe
from hyco_export.errors import HycoError, interrupt_keeps
from tests.cli.test_app import run

ODD = "a[/red]b :bug: [draft] $HOME"
PLACES = {"recipe": "my [draft] recipe.yaml", "run": ODD, "target": "sm8750", "server": "http://[::1]:8411",
          "token_file": "to ken", "ca": "c'a.pem", "insecure": True}  # fmt: skip
GROUP = typer.main.get_command(app.app)
COMMANDS = sorted(name for name, command in GROUP.commands.items() if not hasattr(command, "commands"))


def parsed(line: list[str]) -> typer.Context:
    """The command of a line, with its values."""
    parent = GROUP.make_context("hyco-export", line)
    return GROUP.commands[line[0]].make_context(line[0], line[1:], parent=parent)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `validate` that names every place, of a program that the shell finds by its name."""
    monkeypatch.setattr(sys, "argv", ["-c"])
    words = ["validate"]
    for name, value in PLACES.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    invocation._called[:] = [parsed(words)]
    yield
    invocation._called.clear()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_is_named_gets_the_places_it_takes(called: None, name: str) -> None:
    line = shlex.split(completed(f"hyco-export {name}"))
    assert line[:2] == ["hyco-export", name]
    takes = {one.name for one in GROUP.commands[name].params if one.param_type_name == "option"}
    required = [one.name for one in GROUP.commands[name].params if one.required and one.name not in PLACES]
    if required:
        return  # an artifact, a trace, a new folder: the sentence around it says which
    found = parsed(line[1:]).params
    for place in takes & set(PLACES):
        assert str(found[place]) == str(PLACES[place])


def test_a_sentence_keeps_its_words_around_the_commands(called: None) -> None:
    found = completed("build it again: hyco-export convert-head, then hyco-export compile; see `hyco-export nothing`")
    assert found.startswith("build it again: hyco-export convert-head --recipe 'my [draft] recipe.yaml' --run ")
    assert ", then hyco-export compile --recipe" in found and "--target sm8750; see `hyco-export nothing`" in found
    assert command_line("serve", recipe=None, token_file=None, insecure=None) == f"hyco-export serve --run '{ODD}'"


@pytest.mark.parametrize(
    ("started", "line"),
    [
        ("/env/bin/hyco-export", "hyco-export targets"),
        ("my env/bin/hyco-export", "'my env/bin/hyco-export' targets"),
        ("/x/hyco_export/__main__.py", f"{sys.executable} -m hyco_export targets"),
    ],
)
def test_the_program_is_called_as_it_was(
    called: None, monkeypatch: pytest.MonkeyPatch, started: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(invocation.shutil, "which", lambda _: "/env/bin/hyco-export")
    assert command_line("targets") == line


def test_without_a_call_nothing_is_added() -> None:
    assert completed("try hyco-export compile") == "try hyco-export compile"


def test_the_printed_next_line_works_in_a_shell(tmp_path: Path) -> None:
    recipe = tmp_path / "my [draft] recipe.yaml"
    recipe.write_text(embedded_recipe().read_text(encoding="utf-8"), encoding="utf-8")
    first = run("compile", "--recipe", str(recipe), "--run", ODD, "--target", "sm8750", "--dry-run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (line,) = [line.removeprefix("next: ") for line in first.stdout.splitlines() if line.startswith("next: ")]
    assert f"artifacts: {ODD}" in first.stdout
    start = f"{shlex.quote(sys.executable)} -m hyco_export"
    again = subprocess.run(
        line.replace("hyco-export", start, 1) + " --dry-run",
        shell=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path), "COLUMNS": "80"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert again.stdout.replace(start, "hyco-export") == first.stdout


def test_errors_name_commands_that_work(tmp_path: Path) -> None:
    for command in (["validate", "--server", "http://127.0.0.1:9"], ["serve", "--port", "0"], ["bench"]):
        done = run(*command, "--run", ODD, cwd=tmp_path)
        assert done.returncode == 2, done
        assert f"error: run folder {ODD} does not exist" in done.stderr
        assert f"next: correct --run, or build it: hyco-export compile --run '{ODD}'" in done.stderr
        assert not (tmp_path / ODD).exists()


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_error(HycoError("a server said \x1b[2J\x07 [bold]x[/]", "try \udcff \\[y]"))
    console.output.print("path \x1b[31m [red]")
    seen = capsys.readouterr()
    assert seen.err == "error: a server said \\x1b[2J\\x07 [bold]x[/]\n  next: try \\udcff \\[y]\n"
    assert seen.out == "path \\x1b[31m [red]\n"


def test_an_interrupt_says_what_is_kept_and_nothing_else() -> None:
    def stopped(*kept: str) -> str:
        with pytest.raises(KeyboardInterrupt) as stop:
            work(list(kept))
        return told(stop.value)

    def work(kept: list[str]) -> None:
        if not kept:
            raise KeyboardInterrupt
        with interrupt_keeps(lambda: kept[0]):
            work(kept[1:])

    nothing = "interrupted before anything was finished: nothing is kept, the same command begins anew"
    assert stopped() == "interrupted; this call finished nothing"  # who knows what an earlier one has left
    assert stopped("") == stopped("", "") == nothing
    assert stopped("a and b in runs/x") == "interrupted; kept: a and b in runs/x; the same command goes on from there"


@pytest.mark.parametrize(("error", "end"), [(KeyboardInterrupt(), "interrupted"), (ValueError(), "failed")])
def test_every_clock_stops_and_a_bar_that_is_not_full_says_why(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, end: str
) -> None:
    monkeypatch.setattr(console.LiteralConsole, "shows_bars", True)
    progress = console.ConsoleProgress()
    with pytest.raises(type(error)), progress:
        progress.step("whole [x]", 4, 4)
        progress.step("again", 3, 3)
        progress.step("again", 1, 3)
        progress.step("diagnosis", 3, 4)
        raise error
    whole, again, diagnosis = progress._bars.tasks
    assert (whole.description, whole.finished) == ("whole [x]", True)
    assert (again.description, again.completed) == (f"{end}: again", 1)
    assert (diagnosis.description, diagnosis.stop_time is not None) == (f"{end}: diagnosis", True)


def test_pipes_get_lines_and_no_control_codes() -> None:
    script = (
        "from hyco_export.cli.console import ConsoleProgress\n"
        "with ConsoleProgress() as bars:\n    bars.note('[1/1] a')\n"
        "    bars.step('work', 1, 2)\n    bars.step('work', 2, 2)"
    )
    for color in ({"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
        environment = {"PYTHONPATH": ":".join(sys.path), **color}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)
        assert done.stdout.startswith(b"[1/1] a\n") and done.stdout.endswith(b"  work: 2/2\n")
        assert b"\x1b" not in done.stdout


def test_a_recipe_as_an_argument_is_a_place_and_an_artifact_is_none(called: None) -> None:
    invocation._called[:] = [parsed(["capture", "my recipe.yaml", "--run", "x"])]
    assert command_line("compile") == "hyco-export compile --recipe 'my recipe.yaml' --run x"
    invocation._called[:] = [parsed(["inspect", "runs/tiny/capture"])]
    assert command_line("compile") == "hyco-export compile"


def test_commands_of_the_developers_group_are_completed(called: None) -> None:
    assert completed("hyco-export dev bench-peers").startswith("hyco-export dev bench-peers --recipe 'my [draft]")
    assert completed("hyco-export dev nothing") == "hyco-export dev nothing"


def test_text_is_completed_where_it_leaves_the_program(called: None, capsys: pytest.CaptureFixture[str]) -> None:
    invocation._called[:] = [parsed(["capture", "--run", "x"])]
    error = HycoError("something", "build it: hyco-export compile")
    console.show_error(error)
    console.say("off; build it: hyco-export convert-head")
    console.complain("next: hyco-export qat-head")
    seen = capsys.readouterr()
    assert (
        seen.err
        == "error: something\n  next: build it: hyco-export compile --run x\nnext: hyco-export qat-head --run x\n"
    )
    assert seen.out == "off; build it: hyco-export convert-head --run x\n"
    assert error.hint == "build it: hyco-export compile"
