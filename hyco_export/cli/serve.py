"""What `serve` does: it refuses what cannot work before anything heavy is loaded, then lets `cli.application` serve."""

import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from hyco_export.cli.console import output
from hyco_export.cli.invocation import command_line, is_main, is_shared
from hyco_export.cli.options import open_run, require_built
from hyco_export.core.artifact import COMPILE, MANIFEST_NAME, artifact_name
from hyco_export.errors import ServerError
from hyco_export.protocol.security import (
    VARIABLE,
    certificate_names,
    check_exposure,
    is_named,
    is_self_signed,
    read_tokens,
    server_context,
)
from hyco_export.protocol.server_address import WILDCARDS, url_of
from hyco_export.server.admission import ServeOptions
from hyco_export.stages.run_folder import RunFolder


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
    device: str | None,
    threads: int | None,
    options: ServeOptions,
    replicas: int,
) -> None:
    """Serve until interrupted; the first line on stdout that holds a URL means ready.

    Raises:
        ArtifactError: `run_dir` was given and does not exist.
        ServerError: options that cannot be together, or an address that cannot be listened on.
    """
    if not is_main():
        from hyco_export.cli.application import follow_main

        follow_main(open_run(recipe_path, run_dir), device, threads, options)
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
    ready = partial(_show_ready, run, listen, tls, len(tokens))

    from hyco_export.cli import application  # heavy: after all refusals

    served = application.Served(run, listen, tokens, device, threads, options)
    unfinished = application.serve(served, port, ready, tls, replicas)
    show_stopped(unfinished)


def _show_ready(
    run: RunFolder, listen: ListenOptions, tls: ssl.SSLContext | None, tokens: int, host: str, port: int
) -> None:
    """Print the URL, which means that the server takes calls, and the next command."""
    everywhere = "all addresses of this machine, " if host in WILDCARDS else ""
    output.print(f"serving on {url_of(host, port, listen.tls)} ({everywhere}stop with Ctrl-C)", soft_wrap=True)
    names = certificate_names(tls, listen.certificate) if tls and listen.certificate else ()
    if line := validate_line(run, listen, url_of(named_host(host, names), port, listen.tls), tokens):
        output.print(line, soft_wrap=True)


def named_host(host: str, names: Sequence[str]) -> str:
    """The host of the URL to call: one that the certificate names, where it names any."""
    certain = [name for name in names if "*" not in name]
    return host if not certain or is_named(WILDCARDS.get(host, host), certain) else certain[0]


def validate_line(run: RunFolder, listen: ListenOptions, url: str, tokens: int) -> str:
    """The command that validates what is built for one target; "" where none is, or where several others are."""
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


def show_stopped(unfinished: int | None) -> None:
    """Print the last line of a server; None for the calls of replicas, which nobody counts."""
    if unfinished is None:
        output.print("stopped: sessions are gone")
        return
    answered = f"{unfinished} calls in flight were not finished" if unfinished else "calls in flight were answered"
    output.print(f"stopped: {answered}, sessions are gone")


def require_free_port(host: str, port: int) -> int:
    """The port, or a free one for 0.

    Raises:
        ServerError: another program listens there, or the address is not this machine's.
    """
    from hyco_export.server.serving import bind

    with bind(host, port) as listener:
        return int(listener.getsockname()[1])
