"""The vendor's error texts as errors for users: cause and next step instead of a code.

`KNOWN_ERRORS` holds texts seen with onnxruntime-qnn 2.7; an unknown one is passed on, shortened, with the log's path.
"""

import re
from pathlib import Path
from typing import NamedTuple

from hyco_export.errors import CompileError

# The provider's verbose log about one unit (an operator with its Q and DQ nodes) that the NPU cannot run
REFUSED_UNIT = re.compile(r"Validation FAILED for \d+ nodes in OrtNodeUnit \((\w+)\) :\n((?:.*\n)*?)\s*REASON : (.*)")
NODE_LINE = re.compile(r"Operator type: (\w+) Node name: (\S*)")

SHOWN_CHARS = 300  # of an unknown text: enough for a line that names the operator


class Known(NamedTuple):
    """A text seen in an error, what it means, what to do. `{subject}` is the graph or file worked on."""

    text: str
    message: str
    hint: str


KNOWN_ERRORS = (
    Known(
        "does not exist or is not accessible",
        "the binary that {subject} names is missing",
        "keep the .bin beside its .onnx: both are one artifact; or compile again",
    ),
    Known(
        "Empty cache file encountered",
        "the binary of {subject} is empty",
        "copy it again and compare its sha256 with the manifest, or compile again",
    ),
    Known(
        "Failed to get context binary info",
        "the binary of {subject} is truncated or damaged",
        "copy it again and compare its sha256 with the manifest, or compile again",
    ),
    Known(
        "CREATE_FROM_BINARY",
        "the binary of {subject} was not compiled for this target or this version of the NPU libraries",
        "see what it was built for: hyco-export inspect; compile again for the right --target",
    ),
    Known(
        "fallback to CPU EP has been explicitly disabled",
        "the NPU cannot run all of {subject}",
        "change the operators or widths that the log names",
    ),
    Known(
        "Failed to finalize QNN graph. Error code: 1002",
        "the NPU compiler refuses an operator of {subject} (code 1002)",
        "seen with 4-bit weights whose scales are not on the output-channel axis: check the graph with the lint rules",
    ),
    Known(
        "No such file or directory",
        "a file that {subject} needs is missing",
        "build the stages before this one again: hyco-export run",
    ),
)


def explain(error: str, subject: str, log: Path | None) -> CompileError:
    """The error to raise for the vendor's text `error` about `subject` (a graph or file name)."""
    for known in KNOWN_ERRORS:
        if known.text in error:
            return CompileError(known.message.format(subject=subject), _with_log(known.hint, log))
    words = " ".join(error.split())
    shown = words if len(words) <= SHOWN_CHARS else f"{words[:SHOWN_CHARS]} ..."
    return CompileError(f"the NPU compiler failed on {subject}: {shown}", _with_log("", log))


def passed_on(message: str, hint: str, subject: str, log: Path | None) -> CompileError:
    """The worker's own error about `subject`, which says cause and next step already."""
    named = message if subject in message else f"{subject}: {message}"
    return CompileError(named, _with_log(hint, log))


def read_refusals(verbose_log: str) -> list[str]:
    """Units that the NPU cannot run, as `operator name (reason)`, from the provider's verbose log, each once."""
    refusals: dict[str, None] = {}
    for operator, lines, reason in REFUSED_UNIT.findall(verbose_log):
        names = [name for kind, name in NODE_LINE.findall(lines) if kind == operator]
        refusals[f"{operator} {' '.join(names)} ({reason.strip().rstrip('.')})"] = None
    return list(refusals)


def _with_log(hint: str, log: Path | None) -> str:
    place = "" if log is None else f"its log is {log}"
    return "; ".join(part for part in (hint, place) if part)
