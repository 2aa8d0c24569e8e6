"""Several verifiers behind one address, as a Ray Serve deployment: each replica is a whole server with own sessions.

A session lives in one replica. Calls are routed by a hash of their X-Session-Id header, which every client sends; when
a replica dies, its clients' calls go to others, which do not know their sessions, and the driver primes again. Ray's
own processes exchange pickles on ports of their own, which are bound to the loopback address. What a replica prints
while it starts, and why it does not start, reaches this process through files: Ray writes it to the replica's log only.
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
from pathlib import Path

import msgspec
import psutil
from starlette.applications import Starlette

from hyco_export.errors import HycoError, ServerError
from hyco_export.server.metrics import place_of
from hyco_export.server.serving import KEEP_ALIVE_S, LOOPBACK, STOP_SIGNALS

ENDING_S = 3.0  # for Ray's processes to end by themselves
NAME = "hyco-export"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
IN_FLIGHT = 64  # calls that a replica takes at once: waiting for the model costs nothing
HEALTH_CHECK_S = 1.0  # a replica that hangs is found out; one that died is noticed at once
DRAIN_S = 3.0  # for calls in flight when the server is told to stop; later ones get no answer
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray binds its ports to the loopback address, on Linux too
QUIET = {"enable_access_log": False, "log_level": "ERROR"}  # of a replica's log
SILENT = {"enable_access_log": False, "log_level": "CRITICAL"}  # of the other processes: start errors are told here
POLL_S = 0.1  # between two checks of the replicas' state
OPENS_PORT = "add_port_to_grpc_server"  # function of a private module of Ray's
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
    stopped = threading.Event()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with _ray(replicas, stopped) as folder:
            try:
                _deploy(build, replicas, host, port, folder, certificate, key)
                running = _until_running(folder, stopped)
            finally:
                _repeat_output(folder)
            if running:
                on_ready(host, port)
                stopped.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_on_signals(stopped: threading.Event) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: stopped.set())


@contextlib.contextmanager
def _ray(replicas: int, stopped: threading.Event) -> Iterator[Path]:
    """Ray's processes, and the folder of their logs, which is kept only after an error that no replica has reported. A
    signal to stop sets the event, also while they start.

    Raises:
        ServerError: Ray is not installed.
    """
    os.environ[LOOPBACK_ONLY] = "0"  # read when Ray is imported
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ServerError("several replicas need Ray Serve", "pip install 'hyco-export[ray]'") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _stop_on_signals(stopped)
    folder = Path(tempfile.mkdtemp(prefix="hyco-ray-"))
    keep = False
    try:
        ray.init(
            address="local",
            num_cpus=max(replicas, os.cpu_count() or 1),  # each replica counts as one, however few there are
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
            log_to_driver=True,  # what replicas log of faults while they serve
            configure_logging=False,
        )
        _stop_on_signals(stopped)  # Ray has set a handler of its own
        yield folder
    except Exception:
        keep = not (folder / FAILURE).exists()
        raise
    finally:
        members = psutil.Process().children(recursive=True)
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.ExitStack() as silenced,
        ):  # Ray's messages about them
            silenced.enter_context(contextlib.redirect_stdout(nowhere))
            silenced.enter_context(contextlib.redirect_stderr(nowhere))
            if ray.is_initialized():
                serve.shutdown()
            ray.shutdown()
        for left in psutil.wait_procs(members, timeout=ENDING_S)[1]:  # agents that check for their parent now and then
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        if not keep:
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
    """Have Ray start the replicas; `_until_running` waits for them."""
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
    target = serve.RunTarget(deployment.bind(), name=NAME, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _until_running(folder: Path, stopped: threading.Event) -> bool:
    """Wait until the replicas take calls; False where the server is stopped before. Ray would start a failing replica
    again and again; here the first failure is the end.

    Raises:
        ServerError: a replica did not start; as it reported itself, where it could.
    """
    from ray import serve

    while not stopped.wait(POLL_S):
        if (folder / FAILURE).exists():
            raise ServerError(*msgspec.json.decode((folder / FAILURE).read_bytes(), type=tuple[str, str]))
        found = serve.status().applications.get(NAME)
        if found is None:
            continue
        if found.status == "RUNNING":
            return True
        if found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            hint = f"read the logs in {folder}/session_latest/logs"
            raise ServerError(f"the replicas do not start: {found.message}", hint)
    return False


class _Replica:
    """What Ray wraps around an application."""


def _start(build: Callable[[], Starlette], folder: Path) -> Starlette:
    """A replica's application, in the replica's process. Its output, and why it does not start, go to the folder."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of factories, which Ray calls through it
    with contextlib.ExitStack() as stack:
        for name, redirect in zip(STREAMS, (contextlib.redirect_stdout, contextlib.redirect_stderr), strict=True):
            stack.enter_context(redirect(stack.enter_context((folder / f"{os.getpid()}.{name}").open("w"))))
        try:
            _keep_ports_on_loopback()
            return build()
        except Exception as error:
            found = (f"a replica did not start: {place_of(error)}", "this is a fault of hyco-export: please report it")
            if isinstance(error, HycoError):
                found = (error.message, error.hint)
            written = folder / f"{os.getpid()}.{FAILURE}"
            written.write_bytes(msgspec.json.encode(found))
            written.replace(folder / FAILURE)  # whole or not there
            raise


def _keep_ports_on_loopback() -> None:
    """A replica has a port for calls between deployments, which nobody makes here; Ray opens it on all interfaces.

    Raises:
        ServerError: this version of Ray has another way to open it.
    """
    import ray
    from ray.serve._private import replica

    if not hasattr(replica, OPENS_PORT):
        raise ServerError(
            f"Ray {ray.__version__} opens its replicas' ports in an unknown way, perhaps on all interfaces",
            "install the version that constraints.txt names",
        )
    setattr(replica, OPENS_PORT, lambda server, _address: server.add_insecure_port(f"{LOOPBACK}:0"))


def _repeat_output(folder: Path) -> None:
    """Print what the replicas printed while they started: the first one's output alone, for they say the same but for
    the memory they found, and every error once."""
    printed = [path.read_text().splitlines() for path in sorted(folder.glob("*.stdout"), key=_changed_s)]
    errors = [line for path in sorted(folder.glob("*.stderr")) for line in path.read_text().splitlines()]
    for lines, stream in ((next(filter(None, printed), []), sys.stdout), (dict.fromkeys(errors), sys.stderr)):
        for line in lines:
            print(line, file=stream, flush=True)


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime
