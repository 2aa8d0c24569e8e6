"""Several verifiers behind one address, as a Ray Serve deployment: each replica is a whole server with own sessions.

A session lives in one replica. Calls find it by a hash of their X-Session-Id header, which every client sends; when a
replica dies, its clients' calls go to others, which do not know their sessions, and the driver primes them again. Knows
Ray; no models. Ray's own processes talk by pickles on ports of their own: they are kept on this machine.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette

from hyco_export.errors import ServerError
from hyco_export.runtime.serving import KEEP_ALIVE_S, LOOPBACK, STOP_SIGNALS

NAME = "hyco-export"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
IN_FLIGHT = 64  # calls that a replica takes at once: waiting for the model costs nothing
HEALTH_CHECK_S = 1.0  # a replica that hangs is found out; one that died is noticed at once
DRAIN_S = 10.0


def serve_replicas(
    build: Callable[[], Starlette],
    replicas: int,
    host: str,
    port: int,
    on_ready: Callable[[str, int], None],
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        build: makes a replica's application, in the replica's own process.
        replicas: how many.
        port: a free one; 0 is not understood here.
        on_ready: called with host and port once all replicas take calls.

    Raises:
        ServerError: Ray is not installed, or the replicas do not start.
    """
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions, RequestRouterConfig
    except ImportError as error:
        raise ServerError("several replicas need Ray Serve", "pip install 'hyco-export[ray]'") from error
    stopped = threading.Event()
    with tempfile.TemporaryDirectory(prefix="hyco-ray-") as folder:
        ray.init(
            address="local",
            num_cpus=max(replicas, os.cpu_count() or 1),  # each replica counts as one, however few there are
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            _temp_dir=folder,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            serve.start(
                http_options=HTTPOptions(
                    host=host,
                    port=port,
                    keep_alive_timeout_s=KEEP_ALIVE_S,
                    ssl_certfile=str(certificate) if certificate else None,
                    ssl_keyfile=str(key) if key else None,
                )
            )
            deployment = serve.deployment(
                serve.ingress(build)(_Replica),
                name=NAME,
                num_replicas=replicas,
                max_ongoing_requests=IN_FLIGHT,
                health_check_period_s=HEALTH_CHECK_S,
                graceful_shutdown_timeout_s=DRAIN_S,
                request_router_config=RequestRouterConfig(request_router_class=ROUTER),
                logging_config={"enable_access_log": False},
            )
            serve.run(deployment.bind(), name=NAME, route_prefix="/")
            for number in STOP_SIGNALS:
                signal.signal(number, lambda _number, _frame: stopped.set())
            on_ready(host, port)
            stopped.wait()
        except RuntimeError as error:
            raise ServerError(f"the replicas do not start: {error}", "read the first replica's log") from error
        finally:
            serve.shutdown()
            ray.shutdown()


class _Replica:
    """What Ray wraps around an application."""
