"""A verifier in two processes on the CPU: what one process computes, and serves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma4ForCausalLM
from typer.testing import CliRunner

from hyco_export.cli.app import app
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.device.client import HttpTransport
from hyco_export.device.drafters import Draft, NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Given, Request, Transport
from hyco_export.errors import ProcessGroupError, ServerError
from hyco_export.models.process_group import ProcessGroup
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.tree import ROOT, Source, Tree
from hyco_export.server.assembly import open_server_engine
from hyco_export.server.engine import LocalTransport
from hyco_export.server.interfaces import Check, Prefill
from hyco_export.server.passes.distributed import Followers, LeadingVerifier, follow
from hyco_export.server.passes.verifier import TorchVerifierSession, Verifier
from tests.support import gemma

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SERVE = ("-m", "--", "hyco_export", "serve", "--port", "0", "--cache-mb", "200")
TIMEOUT_S = 180
LOGIT_TOLERANCE = 1e-3  # as in test_verifier
# name -> structure of gemma's and what differs in it: whose K/V heads can be divided by two, and whose cannot
VERIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "one full K/V head": ("k_eq_v", {}),
    "two full K/V heads": ("k_eq_v", {"num_global_key_value_heads": 2}),
    "shared K/V": ("shared with per-layer embeddings", {}),
    "experts": ("experts", {}),
}
ATTENTION = ["self_attn.k_proj.weight", "self_attn.o_proj.weight", "self_attn.q_proj.weight"]
MLP = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]
PROMPT = list(range(20, 200))  # of the embedded verifier: longer than its window
CAP = 48
GREEDY = wire.Sampling(0.0, 0, 1.0)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the whole verifier and its shards gave, by the names of VERIFIERS."""
    arguments = []
    for name, (structure, changes) in VERIFIERS.items():
        pattern, fields = gemma.STRUCTURES[structure]
        model = Gemma4ForCausalLM(gemma.text_config(pattern, **fields, **changes))
        gemma.randomise(model, 0)
        folder = tmp_path_factory.mktemp(name.replace("/", " "))
        model.save_pretrained(folder)
        arguments += [structure, str(folder)]
    script = str(Path(__file__).parents[2] / "support" / "sharded_verifier.py")
    run = subprocess.run(
        [*LAUNCH, script, *arguments], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line.removeprefix("found ")) for line in run.stdout.splitlines() if line.startswith("found ")]
    return dict(zip(VERIFIERS, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_shards_compute_what_the_whole_verifier_does(compared: dict[str, dict[str, Any]], name: str) -> None:
    found = compared[name]
    assert found["logit_spread"] > 100 * LOGIT_TOLERANCE
    assert found["logit_error"] < LOGIT_TOLERANCE
    ours, theirs = found["drafts"]
    assert ours == theirs
    assert found["handoff_bytes"] > 0
    assert found["handoff_error"] <= 1  # a rounding on the border of two grid values


@pytest.mark.slow
def test_attention_is_divided_where_its_heads_can_be(compared: dict[str, dict[str, Any]]) -> None:
    assert compared["one full K/V head"]["divided"] == MLP
    assert compared["one full K/V head"]["cache_share"] == 1
    assert set(compared["two full K/V heads"]["divided"]) > {*MLP, *ATTENTION}
    assert 0.5 < compared["two full K/V heads"]["cache_share"] < 1  # the layers that the head reads are whole
    assert set(compared["experts"]["divided"]) > {"experts.down_proj", "experts.gate_up_proj"}


class Branching:
    """Drafts the right continuation beside wrong siblings, and wrong from its third token on."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        done = len(ids) - len(PROMPT)
        right = [*self._answer[done : done + 2], 9, 9][:3]
        tokens, parents = (8, right[0], 8, right[1], 7, right[2]), (ROOT, ROOT, 1, 1, 3, 3)
        return Draft(Tree(tokens, parents, (0.0,) * len(tokens), (Source.CHAIN,) * len(tokens)))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass


def on_server(transport: Transport) -> GenerationTrace:
    """cloud-mtp: the server's own head drafts."""
    request = Request("cloud-mtp", "0", GREEDY, wire.EXACT, 0, CAP, draft_side="server", draft_steps=4)
    return generate(PROMPT, request, NullDrafter(), transport)


def by_trees(transport: Transport, answer: Sequence[int]) -> GenerationTrace:
    request = Request("tree", "0", GREEDY, wire.EXACT, 0, CAP)
    return generate(PROMPT, request, Branching(answer), transport)


@contextmanager
def launched(log: Path) -> Iterator[tuple[str, "subprocess.Popen[str]", list[psutil.Process]]]:
    """URL of a server in two processes, its launcher, and the two: the main one first."""
    (log.parent / "run").mkdir()  # an empty one: no hand-offs
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*LAUNCH, *SERVE, "--run", str(log.parent / "run")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        ) as launcher,
    ):
        assert launcher.stdout is not None
        try:
            url = next((line.split()[2] for line in launcher.stdout if line.startswith("serving on ")), None)
            assert url is not None, log.read_text()
            workers = psutil.Process(launcher.pid).children()
            workers.sort(key=lambda worker: int(worker.environ()["RANK"]))
            assert len(workers) == 2
            yield url, launcher, workers
        finally:
            launcher.terminate()  # it ends its workers; nothing where it has ended
            launcher.wait(timeout=TIMEOUT_S)


@pytest.mark.slow
def test_two_processes_serve_the_text_of_one(tmp_path: Path) -> None:
    whole = LocalTransport(*open_server_engine(load_recipe(embedded_recipe())))
    alone = on_server(whole)
    assert len(alone.tokens) > 8
    with launched(tmp_path / "log") as (url, launcher, (main, _)):
        transport = HttpTransport(url)
        drafted = on_server(transport)
        checked = by_trees(transport, alone.tokens)
        main.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=TIMEOUT_S) == 0  # the other process was told of the end
    assert drafted.tokens == checked.tokens == alone.tokens
    assert len(drafted.rounds) == len(alone.rounds) < len(alone.tokens)  # the same drafts were accepted
    assert len(checked.rounds) == len(by_trees(whole, alone.tokens).rounds) < len(alone.tokens) / 2
    assert "error" not in (tmp_path / "log").read_text().lower()


@pytest.mark.slow
def test_a_lost_process_ends_the_server_and_says_so(tmp_path: Path) -> None:
    with launched(tmp_path / "log") as (_, launcher, (main, helper)):
        helper.kill()
        assert launcher.wait(timeout=TIMEOUT_S) != 0
        assert not main.is_running()
    assert "another process of this launch ended" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_process_that_stands_still_makes_the_server_not_ready(tmp_path: Path) -> None:
    with launched(tmp_path / "log") as (url, _, (_, helper)):
        assert httpx.get(f"{url}/readyz").text == "ready\n"
        helper.suspend()
        try:
            deadline_s = time.monotonic() + TIMEOUT_S
            while (answer := httpx.get(f"{url}/readyz", timeout=60)).status_code == 200:
                assert time.monotonic() < deadline_s
                time.sleep(0.5)
            assert answer.text.startswith("the model has not answered for ")
            assert httpx.get(f"{url}/healthz").status_code == 200
        finally:
            helper.resume()
        assert httpx.get(f"{url}/readyz", timeout=60).text == "ready\n"


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_process_that_stands_still(tmp_path: Path) -> None:
    with launched(tmp_path / "log") as (url, _, (main, helper)):
        assert httpx.get(f"{url}/readyz").text == "ready\n"
        helper.suspend()
        try:
            time.sleep(6.0)  # the model is asked again only after a while
            assert httpx.get(f"{url}/readyz", timeout=60).status_code == 503  # a pass hangs
            main.terminate()
            assert not psutil.wait_procs([main], timeout=30)[1]
        finally:
            helper.resume()
    assert "TimeoutError" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_option_that_shards_do_not_have_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    command = [*LAUNCH, *SERVE, "--run", str(tmp_path / "run"), "--compile"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode != 0
    assert run.stderr.count("the layers of a sharded verifier are not compiled") == 1


class Tape:
    """A line that keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def receive(self) -> bytes:
        return self.messages.pop(0)


class Watched(Verifier):
    """A follower's verifier that keeps what every pass gave."""

    def __init__(self, model: Gemma4ForCausalLM) -> None:
        super().__init__(model)
        self.states: list[torch.Tensor] = []

    def advance(self, parts: Sequence[Prefill | Check]) -> list[torch.Tensor]:
        states = super().advance(parts)
        self.states += states
        return states


PAIR = ProcessGroup(0, 2, torch.device("cpu"))
STEPS = st.lists(st.tuples(st.sampled_from(["open", "prompt", "check", "close"]), st.integers(0, 2)), max_size=24)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.integers(0, 1000))
def test_a_follower_makes_the_passes_of_its_leader(steps: list[tuple[str, int]], seed: int) -> None:
    model, tape = gemma.tiny_verifier(), Tape()
    numbers = np.random.default_rng(seed)
    led: list[torch.Tensor] = []
    with Followers(PAIR, tape) as followers:  # type: ignore[arg-type]
        leader = LeadingVerifier(followers, model)
        sessions: dict[int, TorchVerifierSession] = {}
        for action, place in steps:
            session = sessions.get(place)
            if action == "open":
                if session is not None:
                    session.close()
                sessions[place] = leader.open()
                sessions[place].reserve(64)
            elif session is None or session.length > 40:
                continue
            elif action == "close":
                sessions.pop(place).close()
            elif action == "prompt":
                led += leader.advance([Prefill(session, numbers.integers(4, gemma.VOCAB, 3))])
            else:
                tokens, parents = numbers.integers(4, gemma.VOCAB, 3), np.array([ROOT, 0, ROOT])
                led += leader.advance([Check(session, 5, tokens, parents)])
                session.commit([(0, 1), (2,), ()][place])
    follower = Watched(model)
    follow(follower, tape)  # type: ignore[arg-type]
    assert not tape.messages
    for ours, theirs in zip(led, follower.states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_a_pass_that_fails_stops_the_server_and_no_other_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _process, number: signals.append(number))
    tape = Tape()
    followers = Followers(PAIR, tape)  # type: ignore[arg-type]
    leader = LeadingVerifier(followers, gemma.tiny_verifier())
    session = leader.open()
    session.reserve(4)
    too_long = np.arange(4, 100)
    with pytest.raises(RuntimeError, match="positions"):
        leader.forward([Prefill(session, too_long)])
    with pytest.raises(ProcessGroupError, match="a pass of the sharded verifier failed: RuntimeError"):
        leader.forward([Prefill(session, too_long[:2])])
    with pytest.raises(ProcessGroupError, match="start the server again"), followers:
        pass
    assert signals == [signal.SIGTERM]
    assert len(tape.messages) == 1


def test_nobody_is_told_of_the_end_in_the_middle_of_a_pass() -> None:
    tape = Tape()
    followers = Followers(ProcessGroup(0, 2, torch.device("cpu")), tape)  # type: ignore[arg-type]
    followers.in_pass = True  # the model's thread hangs
    with pytest.raises(ProcessGroupError, match="TimeoutError"), followers:
        pass
    assert tape.messages == []


def test_the_device_of_a_launch_must_be_the_one_that_was_asked_for() -> None:
    followers = Followers(ProcessGroup(0, 2, torch.device("cuda", 0)), Tape())  # type: ignore[arg-type]
    with pytest.raises(ServerError, match=r"--device cpu, but the processes of this launch compute on cuda .*hide the"):
        open_server_engine(load_recipe(embedded_recipe()), followers=followers)


def test_replicas_and_a_launch_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = CliRunner().invoke(app, ["serve", "--replicas", "2"]).exception
    assert isinstance(refused, ServerError)
    assert refused.message == "--replicas: the processes of a launch make one verifier"
