"""The server behind `serve`: put together, tested with golden positions, and run in one process, several, or replicas.

Loaded when everything that can be refused early has been.
"""

import signal
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from starlette.applications import Starlette

from hyco_export.cli.console import complain, format_bytes, output, say
from hyco_export.cli.invocation import is_shared
from hyco_export.cli.serve import ListenOptions
from hyco_export.core.artifact import HEAD
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.diagnosis.diagnose import diagnose_server
from hyco_export.models.process_group import BroadcastChannel, current_group
from hyco_export.protocol.security import Tokens
from hyco_export.protocol.wire import ServerInfo
from hyco_export.server import serving
from hyco_export.server.admission import ServeOptions
from hyco_export.server.assembly import open_server_engine, open_shard
from hyco_export.server.chat.completions import ChatModel
from hyco_export.server.chat.template import open_chat
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.http import create_app
from hyco_export.server.passes.distributed import Followers, follow
from hyco_export.server.replicas import serve_replicas
from hyco_export.stages.declarations import use_threads
from hyco_export.stages.run_folder import RunFolder

BUILD_HEAD = "build it: hyco-export convert-head"


class Served(NamedTuple):
    """What is served, and to whom: plain values, which pickle."""

    run: RunFolder
    listen: ListenOptions
    tokens: Sequence[str]
    device: str | None  # None: a GPU where there is one
    threads: int | None
    options: ServeOptions


def serve(
    served: Served, port: int, ready: Callable[[str, int], None], tls: ssl.SSLContext | None, replicas: int
) -> int | None:
    """Serve until interrupted; how many calls in flight were not finished, None for replicas."""
    listen = served.listen
    if replicas > 1:
        shares = served._replace(options=msgspec.structs.replace(served.options, servers=replicas))
        build = partial(build_application, shares)
        serve_replicas(build, replicas, listen.host, port, ready, listen.certificate, listen.key)
        return None
    if is_shared():
        with Followers(current_group(), BroadcastChannel()) as followers:
            application = build_application(served, followers)
            return serving.serve(application, host=listen.host, port=port, on_ready=ready, tls=tls)
    return serving.serve(build_application(served), host=listen.host, port=port, on_ready=ready, tls=tls)


def build_application(served: Served, followers: Followers | None = None) -> Starlette:
    """The server's application; prints what it serves. Called in the process that serves it, for a replica in another
    one than the command's."""
    run = served.run
    use_threads(served.threads or run.recipe.threads)
    device = served.device or usual_device(followers)
    engine, info = open_server_engine(run.recipe, run.root, device, run.recipe_folder, served.options, followers)
    try:
        say("\n".join(start_lines(run, engine, info, device)))
        chat = open_chat(run.recipe, run.recipe_folder)
        say(chat_line(chat))
        output.print(served.listen.described(len(served.tokens)), soft_wrap=True)
        if info.head_digest:
            _self_test(run.root, engine, info)
        return create_app(engine, info, Tokens(served.tokens), pad_bytes=served.listen.pad_bytes, chat=chat)
    except BaseException:  # Ctrl-C too: torch aborts the process that ends while a pass is computed
        engine.shut_down()
        raise


def usual_device(followers: Followers | None) -> str:
    """Where a verifier runs for which no device was named."""
    if followers is not None:
        return followers.group.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def start_lines(run: RunFolder, engine: Engine, info: ServerInfo, device: str) -> list[str]:
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
        *rows_line(info),
    ]


def rows_line(info: ServerInfo) -> list[str]:
    """What a pass takes, by its rows; nothing where it was not measured."""
    if not info.rows_ms:
        return []
    points = ", ".join(f"{rows}: {ms:.3g}" for rows, ms in info.rows_ms)
    return [f"passes: ms by rows, {info.clock}: {points}"]


def chat_line(chat: ChatModel) -> str:
    """Under which name chat clients find the model, or why they cannot."""
    if chat.text is None:
        return f"chat clients: off, {chat.refusal}"
    return f"chat clients: on, model {chat.name} at /v1/chat/completions"


def follow_main(run: RunFolder, device: str | None, threads: int | None, options: ServeOptions) -> None:
    """Hold a shard of the verifier that the main process of this launch serves, until it ends."""
    use_threads(threads or run.recipe.threads)
    group, line = current_group(), BroadcastChannel()
    shard = open_shard(run.recipe, group, device or group.device.type, run.recipe_folder, options)
    for number in serving.STOP_SIGNALS:  # reach all processes: the main one ends calls in flight, then the rest
        signal.signal(number, signal.SIG_IGN)
    follow(shard, line)


def _self_test(root: Path, engine: Engine, info: ServerInfo) -> None:
    """Say what is wrong with the server's hand-offs and probabilities; it serves all the same."""

    try:
        found = diagnose_server(root, LocalTransport(engine, info), info)
    except ArtifactError as error:  # a folder with the head alone
        complain(f"self-test: left out, {error.message}")
        return
    for finding in found.findings:
        complain(f"self-test: {finding}")
    if not found.findings:
        output.print(f"self-test: hand-offs and probabilities are right at {found.positions} golden positions")
