"""Several verifiers behind one address, as a Ray Serve deployment: each replica is a whole server with own sessions.

A session lives in one replica. Calls find it by a hash of their X-Session-Id header, which every client sends; when a
replica dies, its clients' calls go to others, which do not know their sessions, and the driver primes them again. Knows
Ray; no models. Ray's own processes talk by pickles on ports of their own: they are kept on this machine. What a replica
says while it starts is told here by files: Ray keeps it in a log of the replica's.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from hyco_export.errors import HycoError, ServerError
from hyco_export.server.metrics import place_of
from hyco_export.server.serving import KEEP_ALIVE_S, LOOPBACK, STOP_SIGNALS

NAME = "hyco-export"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
IN_FLIGHT = 64  # calls that a replica takes at once: waiting for the model costs nothing
HEALTH_CHECK_S = 1.0  # a replica that hangs is found out; one that died is noticed at once
DRAIN_S = 3.0  # for calls in flight when the server is told to stop; the next ones go nowhere
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray binds its ports to the loopback address, on Linux too
QUIET = {"enable_access_log": False, "log_level": "ERROR"}  # of a replica's log
SILENT = {"enable_access_log": False, "log_level": "CRITICAL"}  # of the other processes': why none starts is told here
POLL_S = 0.1  # between two looks whether a replica has failed
STREAMS = ("stdout", "stderr")
FAILURE = "failure"  # file with the message and the hint of the first replica that did not start


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
    with _ray(replicas) as folder:
        from ray import serve

        try:
            _deploy(build, replicas, host, port, folder, certificate, key)
        finally:
            _repeat_words(folder)
        stopped = threading.Event()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda _number, _frame: stopped.set())
        on_ready(host, port)
        stopped.wait()
        serve.shutdown()


@contextlib.contextmanager
def _ray(replicas: int) -> Iterator[Path]:
    """Ray's processes, and the folder of their logs; it is kept where an error that nobody has told ends them."""
    os.environ[LOOPBACK_ONLY] = "0"  # read when Ray is imported
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ServerError("several replicas need Ray Serve", "pip install 'hyco-export[ray]'") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="hyco-ray-"))
    told = False
    try:
        ray.init(
            address="local",
            num_cpus=max(replicas, os.cpu_count() or 1),  # each replica counts as one, however few there are
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
            log_to_driver=True,  # what replicas say of faults while they serve
            configure_logging=False,
        )
        yield folder
        told = True
    finally:
        ray.shutdown()
        if told or (folder / FAILURE).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _deploy(
    build: Callable[[], Starlette],
    replicas: int,
    host: str,
    port: int,
    folder: Path,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Until the replicas take calls.

    Raises:
        ServerError: the first replica does not start.
    """
    from ray import serve
    from ray.serve.config import HTTPOptions, RequestRouterConfig

    serve.start(
        http_options=HTTPOptions(
            host=host,
            port=port,
            keep_alive_timeout_s=KEEP_ALIVE_S,
            ssl_certfile=str(certificate) if certificate else None,
            ssl_keyfile=str(key) if key else None,
        ),
        logging_config=SILENT,
    )
    deployment = serve.deployment(
        serve.ingress(lambda: _start(build, folder))(_Replica),
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=IN_FLIGHT,
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        logging_config=QUIET,
    )
    _until_running(partial(serve.run, deployment.bind(), name=NAME, route_prefix="/"), folder)


class _Replica:
    """What Ray wraps around an application."""


def _start(build: Callable[[], Starlette], folder: Path) -> Starlette:
    """A replica's application, in the replica's process; what it says, or why it does not start, goes to the folder."""
    from ray.serve._private import replica  # its calls between deployments, which nobody makes here, have a port

    replica.add_port_to_grpc_server = lambda server, _address: server.add_insecure_port(f"{LOOPBACK}:0")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of factories, which Ray calls through it
    with contextlib.ExitStack() as stack:
        for name, redirect in zip(STREAMS, (contextlib.redirect_stdout, contextlib.redirect_stderr), strict=True):
            stack.enter_context(redirect(stack.enter_context((folder / f"{os.getpid()}.{name}").open("w"))))
        try:
            return build()
        except Exception as error:
            found = (f"a replica did not start: {place_of(error)}", "this is a fault of hyco-export: please report it")
            if isinstance(error, HycoError):
                found = (error.message, error.hint)
            written = folder / f"{os.getpid()}.{FAILURE}"
            written.write_bytes(msgspec.json.encode(found))
            written.replace(folder / FAILURE)  # whole or not there
            raise


def _repeat_words(folder: Path) -> None:
    """Print what the replicas printed while they started; what several said, once."""
    for name in STREAMS:
        lines = [line for path in sorted(folder.glob(f"*.{name}")) for line in path.read_text().splitlines()]
        for line in dict.fromkeys(lines):
            print(line, file=getattr(sys, name), flush=True)


def _until_running(run: Callable[[], object], folder: Path) -> None:
    """Run the replicas. Ray would start one that fails again and again; here the first failure is the end.

    Raises:
        ServerError: the first replica's own words where it had any.
    """
    ended: Future[object] = Future()

    def runner() -> None:
        try:
            ended.set_result(run())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=runner, daemon=True).start()
    while not (folder / FAILURE).exists():
        with contextlib.suppress(TimeoutError):
            error = ended.exception(timeout=POLL_S)
            if error is None:
                return
            hint = f"read the logs in {folder}/session_latest/logs"
            raise ServerError(f"the replicas do not start: {error}", hint) from error
    raise ServerError(*msgspec.json.decode((folder / FAILURE).read_bytes(), type=tuple[str, str]))
