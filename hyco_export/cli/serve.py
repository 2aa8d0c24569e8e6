"""What `serve` does: say early what cannot work, put the server together, test it, serve."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.console import format_bytes, output, problems
from hyco_export.cli.invocation import command_line, completed
from hyco_export.cli.launch import is_main, is_shared
from hyco_export.cli.runs import open_run, require_built
from hyco_export.core.layout import HEAD
from hyco_export.errors import ArtifactError, ServerError
from hyco_export.runtime.server_address import WILDCARDS, url_of
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.threads import use_threads

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from hyco_export.runtime.engine import Engine
    from hyco_export.runtime.parallel import Followers
    from hyco_export.runtime.serve_options import ServeOptions
    from hyco_export.runtime.wire import ServerInfo


BUILD_HEAD = "build it: hyco-export convert-head"


class Door(msgspec.Struct, frozen=True):
    """Where `serve` listens, and whom it lets in."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    token_file: Path | None
    insecure: bool
    pad_bytes: int  # replies are padded to multiples of it; 0: not

    def described(self, tls: bool, tokens: int) -> str:
        """Who is let in, in one line."""
        who = f"who shows a token ({tokens} known)" if tokens else "everybody who reaches it"
        padded = f"; replies padded to multiples of {self.pad_bytes:,} B" if self.pad_bytes else ""
        return f"access: {who}, {'over TLS' if tls else 'without TLS'}{padded}"


def serve_run(
    recipe_path: Path | None,
    run_dir: Path | None,
    door: Door,
    device: str,
    threads: int | None,
    options: "ServeOptions",
    replicas: int,
) -> None:
    """Serve until interrupted; the first line on stdout that holds a URL means ready.

    Raises:
        ArtifactError: `run_dir` was given and does not exist.
        ServerError: options that cannot be together, or an address that cannot be listened on.
    """
    from hyco_export.runtime.guard.tls import check_exposure, server_context, signed_itself
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
    if run_dir is not None:
        require_built(run)

    def build(followers: "Followers | None" = None) -> "Starlette":
        from hyco_export.runtime.assembly import open_server_engine
        from hyco_export.runtime.server import create_app

        use_threads(threads or run.recipe.threads)
        engine, info = open_server_engine(run.recipe, run.root, device, run.recipe_folder, options, followers)
        output.print("\n".join(start_lines(run, engine, info, device)), soft_wrap=True)
        output.print(door.described(tls is not None, len(tokens)), soft_wrap=True)
        if info.head_digest:
            _self_test(run.root, engine, info)
        return create_app(engine, info, Tokens(tokens), pad_bytes=door.pad_bytes)

    def ready(host: str, port: int) -> None:
        url = url_of(host, port, tls is not None)
        everywhere = "all addresses of this machine, " if host in WILDCARDS else ""
        output.print(f"serving on {url} ({everywhere}stop with Ctrl-C)", soft_wrap=True)
        if (run.root / HEAD).is_dir():
            authority = door.certificate if door.certificate and signed_itself(door.certificate) else None
            places = {"server": url, "ca": authority, "token_file": door.token_file if len(tokens) == 1 else None}
            output.print(f"next, in another shell: {command_line('validate', **places)}", soft_wrap=True)

    if replicas > 1:
        from hyco_export.runtime.replicas import serve_replicas

        serve_replicas(build, replicas, door.host, port, ready, door.certificate, door.key)
        show_stopped()
        return
    from hyco_export.runtime.serving import serve

    if is_shared():
        from hyco_export.nn.crew import Line, current_crew
        from hyco_export.runtime.parallel import Followers

        with Followers(current_crew(), Line()) as followers:
            serve(build(followers), host=door.host, port=door.port, on_ready=ready, tls=tls)
    else:
        serve(build(), host=door.host, port=door.port, on_ready=ready, tls=tls)
    show_stopped()


def show_stopped() -> None:
    """The word at the end of a server."""
    output.print("stopped: calls in flight were answered, sessions are gone")


def start_lines(run: RunFolder, engine: "Engine", info: "ServerInfo", device: str) -> list[str]:
    """What is served, how much of it, and whether devices get hand-offs, one line each."""
    model, limits = run.recipe.models.verifier, engine.limits
    cache = f"{format_bytes(limits.cache_bytes)} of K/V in all" if limits.cache_bytes is not None else "K/V not limited"
    if info.head_digest:
        handoffs = f"on, in the encodings of {run.root / HEAD}"
    elif not run.root.is_dir():
        handoffs = f"off: run folder {run.root} does not exist; {completed(BUILD_HEAD)}"
    else:
        handoffs = f"off: {run.root} holds no {HEAD}; {completed(BUILD_HEAD)}"
    return [
        f"verifier: {model.model}, {model.dtype}, on {device}",
        f"sessions: {limits.sessions} at once, forgotten after {limits.idle_s:g} s without a call; {cache}",
        f"limits: {info.context_limit:,} positions a session; prompts of {info.prompt_limit:,} tokens, "
        f"trees of {info.node_limit} nodes",
        f"hand-offs: {handoffs}",
    ]


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
        problems.print(f"self-test: left out, {error.message}", soft_wrap=True)
        return
    for finding in found.findings:
        problems.print(f"self-test: {completed(str(finding))}", soft_wrap=True)
    if not found.findings:
        output.print(f"self-test: hand-offs and probabilities are right at {found.positions} golden positions")


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ServerError: another program listens there, or the address is not this machine's.
    """
    from hyco_export.runtime.serving import bind

    with bind(host, port) as listener:
        return int(listener.getsockname()[1])
