"""A real server in a thread of the test's process, over TLS where a context is given."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.applications import Starlette

from hyco_export.runtime.guard.slow_peers import PeerLimits
from hyco_export.runtime.serving import AnnouncingServer, bind, configure


@contextmanager
def running(app: Starlette, tls: ssl.SSLContext | None = None, peers: PeerLimits | None = None) -> Iterator[str]:
    """The URL of a server that answers until the block ends."""
    ready = threading.Event()
    server = AnnouncingServer(configure(app, tls, peers), ready.set)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(timeout=30)
    yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=30)
