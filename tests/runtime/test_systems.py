"""The table of systems: what each name asks of the server and drafts with."""

import math

import numpy as np
import pytest
from scripted import HANDOFF, STOP_ID, VOCAB_SIZE, WINDOW, ScriptedHead, ScriptedSession, ScriptedSlm, ToyLanguageModel

from hyco_export.errors import HycoError
from hyco_export.runtime import wire
from hyco_export.runtime.admission import Facts, Limits
from hyco_export.runtime.devices.device import Device
from hyco_export.runtime.drafters import HybridDrafter, NullDrafter, SpecEdgeDrafter, TreeRule
from hyco_export.runtime.driver import generate
from hyco_export.runtime.engine import Engine
from hyco_export.runtime.systems import SYSTEMS, Settings, find_system, make_drafter, make_request
from hyco_export.runtime.transport import LocalTransport
from hyco_export.runtime.tree import Source

MODEL = ToyLanguageModel(stop_bias=-1e9)
KEEP = np.arange(VOCAB_SIZE)
SETTINGS = Settings(
    tree=TreeRule(math.log(0.66), 12, 12),
    specedge=TreeRule(math.log(0.9), 12, 5),
    specedge_passes=4,
    epsilon=0.005,
    server_steps=4,
    head_digest="head",
    stop_ids=frozenset({STOP_ID}),
)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "keep", 32, 64, 4, ["exact"], "thread-cpu")
PROMPT = [5, 9, 2, 7]
GREEDY, PAPER = wire.Sampling(0.0), wire.Sampling(1.0, 64, 0.95)


def toy_device() -> Device:
    return Device(ScriptedHead(MODEL), ScriptedSlm(MODEL, KEEP), HANDOFF, KEEP)


@pytest.mark.parametrize(
    ("name", "side", "steps", "digest", "acceptance"),
    [
        ("plain", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("cloud-mtp", "server", 4, "", wire.Acceptance("exact", 1.0)),
        ("specedge", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("specedge-eps", "device", 0, "", wire.Acceptance("epsilon", 0.005)),
        ("hyco-2p", "device", 0, "head", wire.Acceptance("epsilon", 0.005)),
        ("hyco-exact", "device", 0, "head", wire.Acceptance("exact", 1.0)),
        ("hyco", "device", 0, "head", wire.Acceptance("epsilon", 0.005)),
    ],
)
def test_what_a_system_asks_for(name: str, side: str, steps: int, digest: str, acceptance: wire.Acceptance) -> None:
    request = make_request(find_system(name), SETTINGS, "p7", PAPER, 3, 50)
    assert (request.system, request.prompt_id, request.seed, request.max_new_tokens) == (name, "p7", 3, 50)
    assert (request.draft_side, request.draft_steps, request.head_digest) == (side, steps, digest)
    assert request.acceptance == acceptance
    assert request.sampling == PAPER


def test_drafters_of_the_table() -> None:
    device = toy_device()
    kinds = {name: type(make_drafter(system, SETTINGS, device)) for name, system in SYSTEMS.items()}
    assert kinds == {
        "plain": NullDrafter, "cloud-mtp": NullDrafter, "hyco-exact": HybridDrafter, "hyco": HybridDrafter,
        "hyco-2p": HybridDrafter, "specedge": SpecEdgeDrafter, "specedge-eps": SpecEdgeDrafter,
    }  # fmt: skip


def test_unknown_systems_list_the_known_ones() -> None:
    with pytest.raises(HycoError, match=r"unknown system 'hycoo' \(known ones: plain \(.*cloud-mtp \(.*hyco \("):
        find_system("hycoo")


def test_a_system_that_drafts_needs_a_device() -> None:
    assert isinstance(make_drafter(find_system("cloud-mtp"), SETTINGS, None), NullDrafter)
    with pytest.raises(HycoError, match="system hyco drafts on the device, but none was opened"):
        make_drafter(find_system("hyco"), SETTINGS, None)


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_system_is_lossless_when_greedy_and_its_drafter_serves_many_prompts(name: str) -> None:
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))
    system, device = find_system(name), toy_device()
    drafter = make_drafter(system, SETTINGS, device)
    for prompt in (PROMPT, PROMPT[:1], [2, 2, 8, 9, 10, 3, 4]):
        request = make_request(system, SETTINGS, "p", GREEDY, 1, 20)
        trace = generate(prompt, request, drafter, LocalTransport(engine, INFO))
        assert list(trace.tokens) == MODEL.answer(prompt, 20)
        assert (len(trace.rounds) == 19) == (name == "plain")
    assert engine.session_count == 0


def test_the_epsilon_rule_takes_more_than_the_draws() -> None:
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))
    accepted: dict[str, list[bool]] = {}
    for name in ("hyco", "hyco-exact"):
        system = find_system(name)
        drafter = make_drafter(system, SETTINGS, toy_device())
        rounds = [
            entry
            for seed in range(8)
            for entry in generate(
                PROMPT, make_request(system, SETTINGS, "p", PAPER, seed, 30), drafter, LocalTransport(engine, INFO)
            ).rounds
        ]
        accepted[name] = [drawn for entry in rounds for drawn in entry.drawn]
        assert {entry.tree.sources[row] for entry in rounds for row in entry.accepted} == set(Source)
    assert all(accepted["hyco-exact"])
    assert accepted["hyco"].count(False) > 10
