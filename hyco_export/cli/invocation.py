"""The command as it was called: what it names to go on with carries its places, and Ctrl-C says what it left.

Whoever raises an error or prints a next step writes `hyco-export COMMAND`; the run folder, recipe, server and the like
of this call are added here, for those commands that take them. Knows the parser; no single command.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hyco_export.cli.console import is_main
from hyco_export.errors import HycoError

PROGRAM = "hyco-export"
NAMED = re.compile(rf"{PROGRAM} ([a-z][a-z-]*)")
PLACES = ("recipe", "run", "target", "server", "token_file", "ca", "insecure")  # where things are, and who may ask
INTERRUPTED = 130  # exit code after Ctrl-C, as a shell gives it

_called: list[typer.Context] = []  # the command that runs; none before the command line was understood


class Invocation(TyperCommand):
    """A command whose errors and interrupts are told in terms of this call."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer hides its context's base class
        _called[:] = [ctx]
        try:
            return super().invoke(ctx)
        except HycoError as error:
            error.hint = completed(error.hint)
            raise
        except KeyboardInterrupt as stop:
            if is_main():
                sys.stderr.write(f"{told(stop)}\n")
            raise typer.Exit(INTERRUPTED) from stop


def command_line(name: str, **places: object) -> str:
    """`hyco-export NAME` as it can be copied into a shell: quoted, with the places of this call that NAME takes.

    Args:
        places: further ones, or other values, by parameter name; None leaves one out.
    """
    given = {**_given_places(), **places}
    words = [*_program(), name]
    for parameter in _parameters(name):
        value = given.get(parameter.name)
        if value is True:
            words.append(parameter.opts[0])
        elif value is not None and value is not False:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)


def completed(text: str) -> str:
    """The text with every `hyco-export COMMAND` in it as a line that works."""
    return NAMED.sub(lambda found: command_line(found[1]) if _parameters(found[1]) else found[0], text)


def told(stop: KeyboardInterrupt) -> str:
    """What an interrupt left behind: the notes that `errors.interrupt_keeps` hung on it."""
    kept = getattr(stop, "__notes__", ())
    if not kept:
        return "interrupted before anything was finished: nothing is kept, the same command begins anew"
    return f"interrupted; kept: {'; '.join(kept)}; the same command goes on from there"


def _given_places() -> Mapping[str, object]:
    """The places on this command line, by parameter name."""
    found: dict[str, object] = {}
    for context in _called:
        found |= {name: value for name, value in context.params.items() if name in PLACES and value}
        if "recipe" in context.params and context.params.get("path"):  # the same as an argument
            found["recipe"] = context.params["path"]
    return found


def _parameters(name: str) -> list[Any]:
    """The options of a command of this program that are places; none for another word."""
    for context in _called:
        group = context.find_root().command
        assert isinstance(group, TyperGroup)
        if name in group.commands:
            options = [one for one in group.commands[name].params if one.param_type_name == "option"]
            return [one for one in options if one.name in PLACES]
    return []


def _program() -> list[str]:
    """How this program was started, shortened where a shell finds it by its name."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return [sys.executable, "-m", "hyco_export"]
    found = shutil.which(PROGRAM)
    if started.name != PROGRAM or (found is not None and Path(found).resolve() == started.resolve()):
        return [PROGRAM]
    return [str(started)]
