"""How far the server is with a long prompt, told while PRIME waits: asked of its metrics beside the call."""

import threading
from collections.abc import Callable

from hyco_export.device.interfaces import Transport
from hyco_export.errors import HycoError
from hyco_export.evaluate.connect import OnStep
from hyco_export.protocol import wire
from hyco_export.protocol.wire import Traffic

LONG_IDS = 2_048  # of a prompt that is watched: eight passes of a server's default
INTERVAL_S = 0.5
LABEL = "positions of a long prompt"


class WatchedTransport:
    """Calls of `inner`; of a long prompt `on_step` is told how far it is.

    Args:
        inner: does the calls.
        prefilled: how many ids of waiting prompts the server has processed; None where it does not say.
        on_step: called from another thread while PRIME waits.
        interval_s: seconds between two questions.
    """

    def __init__(
        self,
        inner: Transport,
        prefilled: Callable[[], int | None],
        on_step: OnStep,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._inner = inner
        self._prefilled = prefilled
        self._on_step = on_step
        self._interval_s = interval_s

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    def info(self) -> wire.ServerInfo:
        return self._inner.info()

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        total = len(request.prompt)
        if total < LONG_IDS:
            return self._inner.prime(request)
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(total, done), name="prefill", daemon=True)
        watcher.start()
        try:
            reply = self._inner.prime(request)
        finally:
            done.set()
            watcher.join()
        self._on_step(LABEL, total, total)
        return reply

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        return self._inner.verify(session, round_number, request)

    def close_session(self, session: str) -> None:
        self._inner.close_session(session)

    def _watch(self, total: int, done: threading.Event) -> None:
        while not done.wait(self._interval_s):
            try:
                processed = self._prefilled()
            except HycoError:
                return  # it hides its metrics, or is away: the call itself says so
            if processed is None:
                return
            self._on_step(LABEL, min(processed, total - 1), total)
