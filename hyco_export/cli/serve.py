"""What `serve` does, and a server in a process of its own for the length of a validation or benchmark.

`serve` refuses early what cannot work, puts the server together, tests it and serves. `server_process` starts it as a
child, which ends with its parent.
"""

import ctypes
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.console import complain, format_bytes, output, say
from hyco_export.cli.invocation import command_line, is_main, is_shared
from hyco_export.cli.options import open_run, require_built
from hyco_export.core.artifact import COMPILE, HEAD, MANIFEST_NAME, artifact_name
from hyco_export.errors import ArtifactError, ServerError, UnreachableError
from hyco_export.protocol.server_address import WILDCARDS, url_of
from hyco_export.stages.declarations import use_threads
from hyco_export.stages.run_folder import RunFolder

if TYPE_CHECKING:
    import ssl

    from starlette.applications import Starlette

    from hyco_export.protocol.wire import ServerInfo
    from hyco_export.server.admission import ServeOptions
    from hyco_export.server.engine import Engine
    from hyco_export.server.passes.distributed import Followers

BUILD_HEAD = "build it: hyco-export convert-head"
STOP_TIMEOUT_S = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h: signal to get when the parent dies
EXIT_S = 1.0  # between a connection that a dying process closes, and its end
LAST_LINES = 3  # of the log, in an error
URL_LINE = re.compile(r"serving on (https?://\S+)")


class ListenOptions(msgspec.Struct, frozen=True):
    """Where `serve` listens, and whose calls it takes."""

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    token_file: Path | None
    insecure: bool
    pad_bytes: int  # replies are padded to multiples of it; 0: not

    @property
    def tls(self) -> bool:
        """Is TLS spoken; certificate and key come together."""
        return self.certificate is not None

    def described(self, tokens: int) -> str:
        """Whose calls are taken, in one line; `tokens`: how many are known."""
        who = f"who shows a token ({tokens} known)" if tokens else "everybody who reaches it"
        padded = f"; replies padded to multiples of {self.pad_bytes:,} B" if self.pad_bytes else ""
        return f"access: {who}, {'over TLS' if self.tls else 'without TLS'}{padded}"


def serve_run(
    recipe_path: Path | None,
    run_dir: Path | None,
    listen: ListenOptions,
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
    from hyco_export.protocol.security import check_exposure, read_tokens, server_context

    if not is_main():
        _follow(recipe_path, run_dir, device, threads, options)
        return
    if is_shared() and replicas > 1:
        raise ServerError("--replicas: the processes of a launch make one verifier", "leave one of them out")
    if (listen.certificate is None) != (listen.key is None):
        raise ServerError("--tls-cert and --tls-key belong together", "give both")
    tls = server_context(listen.certificate, listen.key) if listen.certificate and listen.key else None
    tokens = read_tokens(listen.token_file)
    check_exposure(listen.host, tls is not None, bool(tokens), listen.insecure)
    port = require_free_port(listen.host, listen.port)  # a taken one is said before models are loaded
    run = open_run(recipe_path, run_dir)
    if run_dir is not None:
        require_built(run)
    build = partial(build_application, run, listen, tokens, device, threads)

    ready = partial(_show_ready, run, listen, tls, len(tokens))
    if replicas > 1:
        from hyco_export.server.replicas import serve_replicas

        replica = partial(build, msgspec.structs.replace(options, servers=replicas))
        serve_replicas(replica, replicas, listen.host, port, ready, listen.certificate, listen.key)
        output.print("stopped: sessions are gone")
        return
    from hyco_export.server.serving import serve

    if is_shared():
        from hyco_export.models.process_group import BroadcastChannel, current_group
        from hyco_export.server.passes.distributed import Followers

        with Followers(current_group(), BroadcastChannel()) as followers:
            unfinished = serve(build(options, followers), host=listen.host, port=port, on_ready=ready, tls=tls)
    else:
        unfinished = serve(build(options), host=listen.host, port=port, on_ready=ready, tls=tls)
    show_stopped(unfinished)


def build_application(
    run: RunFolder,
    listen: ListenOptions,
    tokens: Sequence[str],
    device: str,
    threads: int | None,
    options: "ServeOptions",
    followers: "Followers | None" = None,
) -> "Starlette":
    """The server's application; prints what it serves. Called in the process that serves it, for a replica in another
    one than the command's: its arguments are plain values that pickle."""
    from hyco_export.protocol.security import Tokens
    from hyco_export.server.assembly import open_server_engine
    from hyco_export.server.http import create_app

    use_threads(threads or run.recipe.threads)
    engine, info = open_server_engine(run.recipe, run.root, device, run.recipe_folder, options, followers)
    try:
        say("\n".join(start_lines(run, engine, info, device)))
        output.print(listen.described(len(tokens)), soft_wrap=True)
        if info.head_digest:
            _self_test(run.root, engine, info)
        return create_app(engine, info, Tokens(tokens), pad_bytes=listen.pad_bytes)
    except BaseException:  # Ctrl-C too: torch aborts the process that ends while a pass is computed
        engine.shut_down()
        raise


def _show_ready(
    run: RunFolder, listen: ListenOptions, tls: "ssl.SSLContext | None", tokens: int, host: str, port: int
) -> None:
    """Print the URL, which means that the server takes calls, and the next command."""
    from hyco_export.protocol.security import certificate_names

    everywhere = "all addresses of this machine, " if host in WILDCARDS else ""
    output.print(f"serving on {url_of(host, port, listen.tls)} ({everywhere}stop with Ctrl-C)", soft_wrap=True)
    names = certificate_names(tls, listen.certificate) if tls and listen.certificate else ()
    if line := validate_line(run, listen, url_of(named_host(host, names), port, listen.tls), tokens):
        output.print(line, soft_wrap=True)


def named_host(host: str, names: Sequence[str]) -> str:
    """The host of the URL to call: one that the certificate names, where it names any."""
    from hyco_export.protocol.security import is_named

    certain = [name for name in names if "*" not in name]
    return host if not certain or is_named(WILDCARDS.get(host, host), certain) else certain[0]


def validate_line(run: RunFolder, listen: ListenOptions, url: str, tokens: int) -> str:
    """The command that validates what is built for one target; "" where none is, or where several others are."""
    from hyco_export.protocol.security import VARIABLE, is_self_signed

    wanted = run.recipe.target
    built = [
        path.parent.name.partition("@")[2] for path in run.root.glob(f"{artifact_name(COMPILE, '*')}/{MANIFEST_NAME}")
    ]
    if wanted not in built and len(built) != 1:
        return ""
    places = {
        "server": url,
        "target": None if wanted in built else built[0],
        "ca": listen.certificate if listen.certificate and is_self_signed(listen.certificate) else None,
        "token_file": listen.token_file if tokens == 1 else None,
    }
    token = f" (with one of the tokens in {VARIABLE})" if tokens > 1 else ""
    return f"next, in another shell{token}: {command_line('validate', **places)}"


def show_stopped(unfinished: int) -> None:
    """Print the last line of a server."""
    answered = f"{unfinished} calls in flight were not finished" if unfinished else "calls in flight were answered"
    output.print(f"stopped: {answered}, sessions are gone")


def start_lines(run: RunFolder, engine: "Engine", info: "ServerInfo", device: str) -> list[str]:
    """What is served, how much of it, and whether devices get hand-offs, one line each."""
    model, limits = run.recipe.models.verifier, engine.limits
    cache = f"{format_bytes(limits.cache_bytes)} of K/V in all" if limits.cache_bytes is not None else "K/V not limited"
    if info.head_digest:
        handoffs = f"on, in the encodings of {run.root / HEAD}"
    elif not run.root.is_dir():
        handoffs = f"off: run folder {run.root} does not exist; {BUILD_HEAD}"
    else:
        handoffs = f"off: {run.root} holds no {HEAD}; {BUILD_HEAD}"
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
    from hyco_export.models.process_group import BroadcastChannel, current_group
    from hyco_export.server.assembly import open_shard
    from hyco_export.server.passes.distributed import follow
    from hyco_export.server.serving import STOP_SIGNALS

    run = open_run(recipe_path, run_dir)
    use_threads(threads or run.recipe.threads)
    group, line = current_group(), BroadcastChannel()
    shard = open_shard(run.recipe, group, device, run.recipe_folder, options)
    for number in STOP_SIGNALS:  # the launcher's reach all processes: the main one ends calls in flight, then the rest
        signal.signal(number, signal.SIG_IGN)
    follow(shard, line)


def _self_test(root: Path, engine: "Engine", info: "ServerInfo") -> None:
    """Say what is wrong with the server's hand-offs and probabilities; it serves all the same."""
    from hyco_export.evaluate.diagnosis.diagnose import diagnose_server
    from hyco_export.server.engine import LocalTransport

    try:
        found = diagnose_server(root, LocalTransport(engine, info), info)
    except ArtifactError as error:  # a folder with the head alone
        complain(f"self-test: left out, {error.message}")
        return
    for finding in found.findings:
        complain(f"self-test: {finding}")
    if not found.findings:
        output.print(f"self-test: hand-offs and probabilities are right at {found.positions} golden positions")


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ServerError: another program listens there, or the address is not this machine's.
    """
    from hyco_export.server.serving import bind

    with bind(host, port) as listener:
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server of ours that runs, its URL and its log."""

    def __init__(
        self, process: "subprocess.Popen[str]", url: str, log: Path, kept: Callable[[], str] = lambda: ""
    ) -> None:
        self._process = process
        self.url = url
        self._log = log
        self._kept = kept

    def require_running(self) -> None:
        """Asked after a call that got no answer.

        Raises:
            ServerError: the process has ended: how, and what it said last.
        """
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return
        raise _ended(self._process, self._log, "in the middle of the work", self._kept())


@contextmanager
def server_process(recipe: Path | None, run_dir: Path, kept: Callable[[], str] = lambda: "") -> Iterator[ServerProcess]:
    """Start `hyco-export serve` on a free port of this machine and yield it once it is ready.

    Args:
        kept: what is finished and stays when the server ends, in words; "" for nothing.

    Raises:
        ServerError: it ended before it was ready, or while calls waited for it; the log holds the reason.
    """
    command = [sys.executable, "-m", "hyco_export", "serve", "--port", "0", "--run", str(run_dir)]
    if recipe is not None:
        command += ["--recipe", str(recipe)]
    log = run_dir / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=_die_with_parent
        )
    try:
        server = ServerProcess(process, _wait_for_url(process, log), log, kept)
        try:
            yield server
        except UnreachableError:
            server.require_running()
            raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for_url(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := URL_LINE.search(line):
            return match.group(1)
    process.wait()
    raise _ended(process, log, "before it was ready")


def _ended(process: "subprocess.Popen[str]", log: Path, when: str, kept: str = "") -> ServerError:
    code = process.returncode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    last = " / ".join(line.strip() for line in log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:])
    said = f"its last lines: {last}" if last else "it said nothing"
    hint = f"read {shlex.quote(str(log))}" if last else "run it again"
    return ServerError(f"the server ended {when} {how}; {said}", f"{hint}; kept: {kept}" if kept else hint)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
