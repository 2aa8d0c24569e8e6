"""What `serve` does: say early what cannot work, put the server together, test it, serve."""

import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.console import output, problems
from hyco_export.cli.launch import is_main, is_shared
from hyco_export.cli.runs import open_run
from hyco_export.errors import ArtifactError, ServerError
from hyco_export.stages.threads import use_threads

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from hyco_export.runtime.engine import Engine
    from hyco_export.runtime.parallel import Followers
    from hyco_export.runtime.serve_options import ServeOptions
    from hyco_export.runtime.wire import ServerInfo


class Door(msgspec.Struct, frozen=True):
    """Where `serve` listens, and whom it lets in."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    token_file: Path | None
    insecure: bool
    pad_bytes: int  # replies are padded to multiples of it; 0: not


def serve_run(
    recipe_path: Path | None,
    run_dir: Path | None,
    door: Door,
    device: str,
    threads: int | None,
    options: "ServeOptions",
    replicas: int,
) -> None:
    """Serve until interrupted; the first line on stdout that holds a URL means ready."""
    from hyco_export.runtime.guard.tls import check_exposure, server_context
    from hyco_export.runtime.guard.tokens import Tokens, read_tokens

    if not is_main():
        _follow(recipe_path, run_dir, device, threads, options)
        return
    if is_shared() and replicas > 1:
        raise ServerError("--replicas: the processes of a launch make one verifier", "leave one of them out")
    if (door.certificate is None) != (door.key is None):
        raise ServerError("--tls-cert and --tls-key belong together", "give both")
    tls = server_context(door.certificate, door.key) if door.certificate and door.key else None
    tokens = read_tokens(door.token_file)
    check_exposure(door.host, tls is not None, bool(tokens), door.insecure)
    port = require_free_port(door.host, door.port)  # a taken one is said before models are loaded
    run = open_run(recipe_path, run_dir)

    def build(followers: "Followers | None" = None) -> "Starlette":
        from hyco_export.runtime.assembly import open_server_engine
        from hyco_export.runtime.server import create_app

        use_threads(threads or run.recipe.threads)
        engine, info = open_server_engine(run.recipe, run.root, device, run.recipe_folder, options, followers)
        if info.head_digest:
            _self_test(run.root, engine, info)
        return create_app(engine, info, Tokens(tokens), pad_bytes=door.pad_bytes)

    def ready(host: str, port: int) -> None:
        output.print(f"serving on {'https' if tls else 'http'}://{host}:{port} (stop with Ctrl-C)", highlight=False)

    if replicas > 1:
        from hyco_export.runtime.replicas import serve_replicas

        serve_replicas(build, replicas, door.host, port, ready, door.certificate, door.key)
        return
    from hyco_export.runtime.serving import serve

    if is_shared():
        from hyco_export.nn.crew import Line, current_crew
        from hyco_export.runtime.parallel import Followers

        with Followers(current_crew(), Line()) as followers:
            serve(build(followers), host=door.host, port=door.port, on_ready=ready, tls=tls)
        return
    serve(build(), host=door.host, port=door.port, on_ready=ready, tls=tls)


def _follow(
    recipe_path: Path | None, run_dir: Path | None, device: str, threads: int | None, options: "ServeOptions"
) -> None:
    """Hold a shard of the verifier that the main process of this launch serves, until it ends."""
    from hyco_export.nn.crew import Line, current_crew
    from hyco_export.runtime.assembly import open_shard
    from hyco_export.runtime.parallel import follow
    from hyco_export.runtime.serving import STOP_SIGNALS

    run = open_run(recipe_path, run_dir)
    use_threads(threads or run.recipe.threads)
    crew, line = current_crew(), Line()
    shard = open_shard(run.recipe, crew, device, run.recipe_folder, options)
    for number in STOP_SIGNALS:  # the launcher's reach all processes: the main one ends calls in flight, then the rest
        signal.signal(number, signal.SIG_IGN)
    follow(shard, line)


def _self_test(root: Path, engine: "Engine", info: "ServerInfo") -> None:
    """Say what is wrong with the server's hand-offs and probabilities; it serves all the same."""
    from hyco_export.evaluate.diagnose import diagnose_server
    from hyco_export.runtime.transport import LocalTransport

    try:
        found = diagnose_server(root, LocalTransport(engine, info), info)
    except ArtifactError as error:  # a folder with the head alone
        problems.print(f"self-test: left out, {error.message}", highlight=False, markup=False, soft_wrap=True)
        return
    for finding in found.findings:
        problems.print(f"self-test: {finding}", highlight=False, markup=False, soft_wrap=True)
    if not found.findings:
        output.print(
            f"self-test: hand-offs and probabilities are right at {found.positions} golden positions", highlight=False
        )


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ServerError: another program listens there, or the address is not this machine's.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            "choose another --host or --port; --port 0 takes a free one",
        ) from error
