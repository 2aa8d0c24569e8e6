"""Ctrl-C during a collection: it must neither vanish in a finalizer nor cut the collection short."""

import gc
import signal

import pytest

from hyco_export.core.memory import release_freed


class Interrupting:
    """Its finalizer is where the signal arrives."""

    def __init__(self) -> None:
        self.circle = self

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_finalizer_is_not_lost() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gc.disable()
        Interrupting()
        with pytest.raises(KeyboardInterrupt):
            release_freed()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, usual)


def test_other_handlers_are_left_alone() -> None:
    seen = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        Interrupting()
        release_freed()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, usual)
