"""The vendor's error texts as errors for users: cause and next step instead of a code.

`KNOWN_ERRORS` holds texts seen with onnxruntime-qnn 2.7, on phones and in the vendor's service (codes: QnnContext.h,
QnnCommon.h, QnnDevice.h); an unknown one is passed on, shortened, with the log's path. `TRAPS` fail without a text.
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
    """A text seen in an error, what it means, what to do. `{subject}` is the graph or file worked on.

    `where`: compile, load or run; a code may mean something else elsewhere, so the first entry that fits counts.
    """

    text: str
    message: str
    hint: str
    where: str = "load"

    def fits(self, error: str) -> bool:
        """Whether `text` stands in the error; no part of a longer number or word."""
        return re.search(rf"(?<![0-9A-Za-z]){re.escape(self.text)}(?![0-9A-Za-z])", error, re.IGNORECASE) is not None


CAUSE_SKEL = (
    "the phone does not find the NPU's own library (libQnnHtpV<arch>Skel.so) that belongs to {subject}'s runtime"
)
CURE_SKEL = (
    "put the skel of the runtime's own QAIRT version into a folder of the app and name that folder first in "
    "ADSP_LIBRARY_PATH; take all five libraries (QnnHtp, QnnHtpPrepare, QnnSystem, stub, skel) from one version"
)
CAUSE_VERSION = "{subject} was made by another version of the NPU's libraries (QAIRT) than the one that loads it"
CURE_VERSION = (
    "load it with the version that `hyco-export inspect` shows or a newer one, or compile it for the older one: "
    "hyco-export compile --qairt-wheel VERSION"
)
CURE_MEMORY = "open large graphs one after the other, or set the provider's enable_vtcm_backup_buffer_sharing to 1"

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
        "0x753a",
        "{subject} is no context binary that this version of the NPU's libraries can read",
        "copy it again and compare its sha256 with the manifest; a newer library may have written it: see its "
        "manifest's versions",
    ),
    Known("BINARY_VERSION", CAUSE_VERSION, CURE_VERSION),
    Known("5004", CAUSE_VERSION, CURE_VERSION),
    Known(
        "CREATE_FROM_BINARY",
        "the binary of {subject} was not compiled for this target or this version of the NPU libraries",
        "see what it was built for: hyco-export inspect; compile again for the right --target",
    ),
    Known(
        "5005",
        "the binary of {subject} was not compiled for this target or this version of the NPU libraries (code 5005)",
        "see what it was built for: hyco-export inspect; compile again for the right --target",
    ),
    Known(
        "BINARY_SUBOPTIMAL",
        "{subject} was compiled for another chip of the same NPU architecture",
        "compile it for this chip, so that it uses all of its NPU: hyco-export compile --target NAME",
    ),
    Known("14001", CAUSE_SKEL, CURE_SKEL),
    Known("0x80000600", CAUSE_SKEL, CURE_SKEL),
    Known("Failed to load skel", CAUSE_SKEL, CURE_SKEL),
    Known(
        "libcdsprpc.so",
        "the app that loads {subject} may not use the NPU's driver (libcdsprpc.so)",
        'declare <uses-native-library android:name="libcdsprpc.so" android:required="false"/> in its manifest',
    ),
    Known(
        "fallback to CPU EP has been explicitly disabled",
        "the NPU cannot run all of {subject}",
        "change the operators or widths that the log names",
        "compile",
    ),
    Known(
        "Failed to finalize QNN graph. Error code: 1002",
        "the NPU compiler refuses an operator of {subject} (code 1002)",
        "seen with 4-bit weights whose scales are not on the output-channel axis: check the graph with the lint rules",
        "compile",
    ),
    Known(
        "Error code: 1002",
        "the NPU could not give {subject} the memory that it asks for (code 1002)",
        CURE_MEMORY,
    ),
    Known(
        "MEM_ALLOC",
        "the NPU could not give {subject} the memory that it asks for",
        CURE_MEMORY,
    ),
    Known(
        "share_ep_contexts",
        "{subject} shares its binary with another graph, which must be opened first in the same process",
        "open both sessions in one process with ep.share_ep_contexts = 1, or use the separate binaries; x86 opens only "
        "those",
    ),
    Known(
        "QNN_GRAPH_ERROR_EXECUTE",
        "the NPU stopped in the middle of {subject}",
        "run it once more after restarting the app; if it stays, compile again and compare with: hyco-export bisect",
        "run",
    ),
    Known(
        "TIMED_OUT",
        "the NPU did not answer in time while working on {subject}",
        "close other users of the NPU, or let the phone cool down, and try again",
        "run",
    ),
    Known(
        "No such file or directory",
        "a file that {subject} needs is missing",
        "build the stages before this one again: hyco-export run",
        "compile",
    ),
)


class Trap(NamedTuple):
    """A failure without an error text: how it shows, why, what to do."""

    symptom: str
    cause: str
    cure: str


TRAPS = (
    Trap(
        "right outputs, times of a CPU",
        "the provider left the graph, or a part of it, to the CPU",
        "set session.disable_cpu_ep_fallback to 1: the session then fails and says what cannot run",
    ),
    Trap(
        "ids modulo 65,536",
        "TopK and ArgMax on the NPU count to 65,536",
        "search such an axis in parts, as the graphs of convert-head do (the lint rules find it)",
    ),
    Trap(
        "outputs near 1 dB",
        "the binary was finalised at level 1",
        "compile at level 3; `hyco-export inspect` refuses level 1",
    ),
    Trap(
        "outputs that have nothing to do with the graph's",
        "INT2 weights came through QDQ",
        "store 2-bit integers in INT4, or set $.compile.two_bit_weights",
    ),
    Trap(
        "attention that sees hidden positions",
        "a mask outside -255 to -50 in 16 bits",
        "write -100 ($.calibration.mask_value)",
    ),
    Trap(
        "the vendor's own skel is loaded",
        "the system's folder stands before the app's in ADSP_LIBRARY_PATH",
        "name the app's folder first",
    ),
    Trap(
        "slower than the vendor's own programs",
        "the NPU runs in its default performance mode, and tensors are copied",
        "set htp_performance_mode to burst and rpc_control_latency for the run, bind inputs and outputs, and set "
        "enable_htp_shared_memory_allocator to 1",
    ),
    Trap(
        "an old runtime in the app",
        "com.microsoft.onnxruntime:onnxruntime-android-qnn is the retired package",
        "take com.qualcomm.qti:onnxruntime-android-qnn, com.microsoft.onnxruntime:onnxruntime-android and "
        "com.qualcomm.qti:qnn-runtime",
    ),
)


def find_known(error: str) -> Known | None:
    """The first entry of the table that a vendor's text fits."""
    return next((known for known in KNOWN_ERRORS if known.fits(error)), None)


def explain(error: str, subject: str, log: Path | None) -> CompileError:
    """The error to raise for the vendor's text `error` about `subject` (a graph or file name)."""
    known = find_known(error)
    if known is not None:
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
