"""The command as it was called: the places it names, its process of a launch, and what Ctrl-C leaves.

Whoever raises an error or prints a next step writes `hyco-export COMMAND`. Where the text leaves the program (terminal,
report page), `completed` adds the run folder, recipe, server and the like of this call to the commands that take them.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

PROGRAM = "hyco-export"
NAMED = re.compile(rf"{PROGRAM} ((?:dev )?[a-z][a-z-]*)")
PLACES = ("recipe", "run", "target", "server", "token_file", "ca", "insecure")  # where things are, and who may ask
INTERRUPTED = 130  # exit code after Ctrl-C, as a shell gives it

RANK = "RANK"  # set by `torchrun` and `accelerate launch`: number of this process
WORLD_SIZE = "WORLD_SIZE"  # the same: how many there are

_called: list[typer.Context] = []  # the command that runs; none before the command line was understood
_implied: dict[str, object] = {}  # places that follow from other arguments of this call


def is_launched() -> bool:
    """Was this process started by a launcher, as one of several."""
    return RANK in os.environ


def is_shared() -> bool:
    """Does this launch have more than one process."""
    return int(os.environ.get(WORLD_SIZE, "1")) > 1


def is_main() -> bool:
    """Is this the process that prints, and does what the others cannot help with."""
    return int(os.environ.get(RANK, "0")) == 0


class Invocation(TyperCommand):
    """A command that remembers how it was called, and whose interrupts say what is kept."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer hides its context's base class
        _called[:] = [ctx]
        _implied.clear()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            if is_main():
                sys.stderr.write(f"{told(stop)}\n")
            raise typer.Exit(INTERRUPTED) from stop


def imply(**places: object) -> None:
    """Places of this call that no option names, such as the run folder of an artifact that is inspected."""
    _implied.update(places)


def command_line(name: str, **places: object) -> str:
    """`hyco-export NAME` as it can be copied into a shell: quoted, with the places of this call that NAME takes.

    Args:
        places: further ones, or other values, by parameter name; None leaves one out.
    """
    given = {**_given_places(), **places}
    words = [*_program(), *name.split()]
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
    """What an interrupt left behind: the notes that `errors.interrupt_keeps` hung on it, empty ones for nothing."""
    notes = getattr(stop, "__notes__", None)
    if notes is None:  # nobody knows what earlier calls have left: only what this one did
        return "interrupted; this call finished nothing"
    kept = list(filter(None, notes))
    if not kept:
        return "interrupted before anything was finished: nothing is kept, the same command begins anew"
    return f"interrupted; kept: {'; '.join(kept)}; the same command goes on from there"


def _given_places() -> Mapping[str, object]:
    """The places on this command line, by parameter name."""
    found: dict[str, object] = dict(_implied)
    for context in _called:
        found |= {name: value for name, value in context.params.items() if name in PLACES and value}
        if "recipe" in context.params and context.params.get("path"):  # the same as an argument
            found["recipe"] = context.params["path"]
    return found


def _parameters(name: str) -> list[Any]:
    """The options of a command of this program (`dev NAME`: of the group) that are places; none for another word."""
    for context in _called:
        command: Any = context.find_root().command
        for word in name.split():
            command = command.commands.get(word) if isinstance(command, TyperGroup) else None
        if command is not None:
            return [one for one in command.params if one.param_type_name == "option" and one.name in PLACES]
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
