"""Errors that a user can act on: one exception family, caught once, in the CLI.

Every error carries a message (the value and the rule it breaks) and a hint (the next step).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HycoError(Exception):
    """Something the user can act on.

    Args:
        message: the value seen and the rule it breaks, one line.
        hint: the next step, one line; empty only where the message already says it.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class RecipeError(HycoError):
    """A recipe that cannot be run: the field's path and the rule."""


class CheckpointError(HycoError):
    """A checkpoint that is missing, unreadable or does not belong with the others."""


class ArtifactError(HycoError):
    """An artifact folder that is missing, incomplete, altered or from another run."""


class StorageError(HycoError):
    """The operating system refused a file operation: the disk is full, a folder is read-only, a path does not exist."""


class StrayFileError(ArtifactError):
    """A file in an artifact folder that its manifest does not list: a stray file, not damage."""


class FormatError(HycoError):
    """A file that is not what its name or first bytes say: cut short, damaged, or larger inside than it may be."""


class ProcessGroupError(HycoError):
    """A process group cannot go on: one of its processes ended."""


class CompileError(HycoError):
    """The NPU compiler or the emulator refused a graph, or made something other than what was asked for."""


class GateError(HycoError):
    """A measured value is on the wrong side of its limit."""

    exit_code = 1


class ProtocolError(HycoError):
    """A request or reply that breaks the wire format; `code` is the typed reason that travels on the wire.

    `wait_s`: seconds after which the same call may succeed; 0 where waiting does not help.
    """

    def __init__(self, code: str, message: str, hint: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, hint)
        self.code = code
        self.wait_s = wait_s


class ServerError(HycoError):
    """The verifier server cannot be reached, is not ready, or refuses a call."""


class UnreachableError(ServerError):
    """A call got no answer: the server may or may not have executed it. Sending the same call again is safe."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one-line messages; a KeyError becomes `no 'NAME'`."""
    if isinstance(error, KeyError) and error.args:
        said = str(error.args[0])
        return said if " " in said else f"no {said!r}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(number: int, what: str) -> str:
    """A number with its noun: "1 prompt", "2,000 prompts"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@contextmanager
def interrupt_keeps(kept: Callable[[], str]) -> Iterator[None]:
    """Run a block that Ctrl-C may end; `kept` says what is finished by then ("" for nothing), added as a note."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept())
        raise
