"""How a test starts a process that it will interrupt."""

import signal


def listen_to_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so do its children; a user's Ctrl-C is in front."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
