"""The server that `serve` starts: its first lines, and what a self-test that ends leaves."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from hyco_export.cli import application, serve
from hyco_export.cli.application import chat_line, start_lines, usual_device
from hyco_export.protocol import wire
from hyco_export.server.admission import Facts, Limits, ServeOptions
from hyco_export.server.chat.completions import ChatModel
from hyco_export.stages.run_folder import RunFolder
from tests.cli.test_build import listen_options
from tests.support.toy_chat import CHAT


@pytest.mark.parametrize("there", [True, False])
def test_a_server_says_what_it_serves_and_why_it_hands_nothing_off(run: RunFolder, there: bool) -> None:
    if not there:
        run = RunFolder(run.root / "typo", run.recipe, None)
    facts = Facts(1536, frozenset({1}), 4096, "", 0, 4, restricts=False)
    engine = SimpleNamespace(limits=Limits(sessions=3, cache_bytes=5_000_000), facts=facts)
    info = wire.ServerInfo(1, "test", "v", "t", 16, [1], "", "", 32, 64, 4, ["exact"], "thread-cpu", 4096)
    lines = start_lines(run, engine, info, "cpu")  # type: ignore[arg-type]  # what it reads of an engine
    assert lines[:3] == [
        "verifier: embedded:verifier, float32, on cpu",
        "sessions: 3 at once, forgotten after 600 s without a call; 5.00 MB of K/V in all",
        "limits: 4,096 positions a session; prompts of 64 tokens, trees of 32 nodes",
    ]
    why = f"{run.root} holds no convert-head" if there else f"run folder {run.root} does not exist"
    assert lines[3] == f"hand-offs: off: {why}; build it: hyco-export convert-head"
    assert len(lines) == 4
    measured = msgspec.structs.replace(info, rows_ms=[(1, 2.5), (5, 3.25), (33, 12.04)])
    line = start_lines(run, engine, measured, "cpu")[4]  # type: ignore[arg-type]
    assert line == "passes: ms by rows, thread-cpu: 1: 2.5, 5: 3.25, 33: 12"
    named = wire.ServerInfo(1, "test", "v", "t", 16, [1], "key", "", 32, 64, 4, ["exact"], "thread-cpu", 4096)
    on = start_lines(run, engine, named, "cpu")[3]  # type: ignore[arg-type]
    assert on == f"hand-offs: on, in the encodings of {run.root / 'convert-head'}"


def test_a_server_says_under_which_name_chat_clients_find_it_or_why_not() -> None:
    assert chat_line(CHAT) == f"chat clients: on, model {CHAT.name} at /v1/chat/completions"
    silent = ChatModel("m", None, CHAT.sampling, "its tokenizer has no chat template")
    assert chat_line(silent) == "chat clients: off, its tokenizer has no chat template"


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_an_engine_whose_self_test_ends_is_shut_down(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    def end(*_: object) -> None:
        raise fault

    ended: list[str] = []
    engine = SimpleNamespace(shut_down=lambda: ended.append("engine"))
    opened = (engine, SimpleNamespace(head_digest="key"))
    monkeypatch.setattr("hyco_export.cli.application.open_server_engine", lambda *_: opened)
    monkeypatch.setattr(serve, "open_run", lambda *_: run)
    monkeypatch.setattr(application, "use_threads", lambda *_: None)
    monkeypatch.setattr(application, "start_lines", lambda *_: [])
    monkeypatch.setattr(application, "_self_test", end)
    with pytest.raises(fault):
        serve.serve_run(None, None, listen_options(port=0), "cpu", None, ServeOptions(), 1)
    assert ended == ["engine"]


@pytest.mark.parametrize("there", [True, False])
def test_a_verifier_runs_on_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert usual_device(None) == ("cuda" if there else "cpu")
    shared = SimpleNamespace(group=SimpleNamespace(device=torch.device("cuda:1" if there else "cpu")))
    assert usual_device(shared) == ("cuda" if there else "cpu")  # type: ignore[arg-type]
