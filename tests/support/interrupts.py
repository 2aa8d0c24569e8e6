"""How a test starts a process that it will interrupt."""

import os
import signal
import subprocess
import sys


def listen_to_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so do its children; a user's Ctrl-C is in front."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(*words: str) -> subprocess.Popen[str]:
    """`hyco-export` with these words, in a process that an interrupt reaches."""
    return subprocess.Popen(
        [sys.executable, "-m", "hyco_export", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
