"""What can go wrong for a user: one exception family, caught once, in the CLI.

Every error carries a message (the value and the rule it breaks) and a hint (the next step). It knows nothing of how
errors are printed.
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
    """The operating system refused a file: the disk is full, a folder is read-only, a path is not there."""


class StrayFileError(ArtifactError):
    """A file in an artifact folder that is none of the artifact's: somebody's, not damage."""


class CrewError(HycoError):
    """The processes of one launch cannot go on together: one of them ended."""


class CompileError(HycoError):
    """The NPU compiler or the emulator refused a graph or gave something else than was asked for."""


class GateError(HycoError):
    """A measured value is on the wrong side of its limit."""

    exit_code = 1


class ProtocolError(HycoError):
    """A request or reply that breaks the wire format; `code` is the typed reason that travels on the wire.

    `wait_s`: the same call may be taken after so many seconds; 0 where waiting cures nothing.
    """

    def __init__(self, code: str, message: str, hint: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, hint)
        self.code = code
        self.wait_s = wait_s


class ServerError(HycoError):
    """The verifier server cannot be reached, is not ready, or refuses to go on."""


class UnreachableError(ServerError):
    """A call got no answer: the server may or may not have done it. The same call can be sent again."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one-line messages; of a missing key more than its name."""
    if isinstance(error, KeyError) and error.args:
        said = str(error.args[0])
        return said if " " in said else f"no {said!r}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(number: int, what: str) -> str:
    """A number with its noun: "1 prompt", "2,000 prompts"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@contextmanager
def interrupt_keeps(kept: Callable[[], str]) -> Iterator[None]:
    """Work that Ctrl-C may end: the interrupt carries what is finished by then, as `kept` says it ("" for nothing)."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept())
        raise
