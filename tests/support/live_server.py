"""A real server in a thread of the test's process, over TLS where a context is given."""

import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.applications import Starlette

from hyco_export.server.connections import PeerLimits
from hyco_export.server.serving import AnnouncingServer, bind, configure


class LiveServer:
    """A server that can be stopped, and started again at the same port with another app of `make_app`."""

    def __init__(
        self, make_app: Callable[[], Starlette], tls: ssl.SSLContext | None = None, peers: PeerLimits | None = None
    ) -> None:
        self._make_app, self._tls, self._peers = make_app, tls, peers
        self._port = 0
        self.running = False
        self.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._port}"

    def start(self) -> None:
        _spare_captured_stderr()
        ready = threading.Event()
        self._server = AnnouncingServer(configure(self._make_app(), self._tls, self._peers), ready.set)
        listener = bind("127.0.0.1", self._port)
        self._port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        assert ready.wait(timeout=30)
        self.running = True

    def stop(self) -> None:
        """Connections are closed when this returns."""
        self._server.should_exit = True
        self._thread.join(timeout=30)
        self.running = False

    @property
    def unfinished(self) -> int:
        """Calls in flight that were not finished when it stopped."""
        return self._server.unfinished


def _spare_captured_stderr() -> None:
    """A server configures logging, which closes known handlers; absl's, which rouge-score brings along, then closes its
    stream: the stderr that pytest captures, where a test has another one."""
    if (absl := sys.modules.get("absl.logging")) is not None:
        absl.get_absl_handler().python_handler.stream = sys.__stderr__


@contextmanager
def running(app: Starlette, tls: ssl.SSLContext | None = None, peers: PeerLimits | None = None) -> Iterator[str]:
    """The URL of a server that answers until the block ends."""
    server = LiveServer(lambda: app, tls, peers)
    yield server.url
    server.stop()
