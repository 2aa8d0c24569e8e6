"""The table of systems: what each name asks of the server and drafts with."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from hyco_export.core.recipe import Drafting, SlmChain, SpecEdge, Synera
from hyco_export.device.backends import Device
from hyco_export.device.drafters import (
    HeadChainDrafter,
    HybridDrafter,
    NullDrafter,
    ProactiveSpecEdgeDrafter,
    SlmChainDrafter,
    SpecEdgeDrafter,
)
from hyco_export.device.driver import Generation, generate
from hyco_export.device.systems import SYSTEMS, Settings, find_system, make_drafter, make_policy, make_request
from hyco_export.errors import HycoError
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.tree import Source
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.support.scripted import (
    HANDOFF,
    RESTRICTED_IDS,
    STOP_ID,
    VOCAB_SIZE,
    WINDOW,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
    ToyLanguageModel,
)

MODEL = ToyLanguageModel(stop_bias=-1e9)
KEEP = np.arange(VOCAB_SIZE)
SETTINGS = Settings(
    drafting=Drafting(
        budget=12,
        chain_acceptance=0.66,
        candidates_per_row=12,
        specedge=SpecEdge(passes=4, children_per_row=5, edge_factor=0.9),
        sled=SlmChain(0.3, 5),
        synera=Synera(0.3, 5, 6),
    ),
    epsilon=0.005,
    server_steps=4,
    head_digest="head",
    vocab_size=VOCAB_SIZE,
    stop_ids=frozenset({STOP_ID}),
)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4, restricts=True)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "keep", 32, 64, 4, ["exact"], "thread-cpu")
PROMPT = [5, 9, 2, 7]
GREEDY, PAPER = wire.Sampling(0.0, 64, 0.95), wire.Sampling(1.0, 64, 0.95)


def toy_device() -> Device:
    return Device(ScriptedHead(MODEL), ScriptedSlm(MODEL, KEEP), HANDOFF, KEEP)


@pytest.mark.parametrize(
    ("name", "side", "steps", "digest", "acceptance"),
    [
        ("plain", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("cloud-mtp", "server", 4, "", wire.Acceptance("exact", 1.0)),
        ("cloud-mtp-kept", "server", 4, "", wire.Acceptance("exact", 1.0)),
        ("hyco-head-only", "device", 0, "head", wire.Acceptance("exact", 1.0)),
        ("hyco-eps-at-rejections", "device", 0, "head", wire.Acceptance("epsilon-at-rejections", 0.005)),
        ("hyco-typical", "device", 0, "head", wire.Acceptance("typical", 1.0)),
        ("specedge", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("specedge-eps", "device", 0, "", wire.Acceptance("epsilon", 0.005)),
        ("specedge-pd", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("hyco-server-head", "reply", 4, "", wire.Acceptance("exact", 1.0)),
        ("sled", "device", 0, "", wire.Acceptance("exact", 1.0)),
        ("synera", "device", 0, "", wire.Acceptance("exact", 1.0)),
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
        "specedge-pd": ProactiveSpecEdgeDrafter, "hyco-server-head": HybridDrafter, "on-device": SlmChainDrafter,
        "sled": SlmChainDrafter, "synera": SlmChainDrafter, "cloud-mtp-kept": NullDrafter,
        "hyco-head-only": HeadChainDrafter, "hyco-eps-at-rejections": HybridDrafter, "hyco-typical": HybridDrafter,
    }  # fmt: skip


def test_unknown_systems_list_the_known_ones() -> None:
    with pytest.raises(HycoError, match=r"unknown system 'hycoo' \(known ones: plain \(.*cloud-mtp \(.*hyco \("):
        find_system("hycoo")


def test_a_system_that_drafts_needs_a_device() -> None:
    assert isinstance(make_drafter(find_system("cloud-mtp"), SETTINGS, None), NullDrafter)
    with pytest.raises(HycoError, match="system hyco drafts on the device, but none was opened"):
        make_drafter(find_system("hyco"), SETTINGS, None)


def run(name: str, prompt: list[int], sampling: wire.Sampling, seed: int, cap: int, **parts: object) -> GenerationTrace:
    """A generation of a named system against the engine, over a fresh toy device unless one is given."""
    system = find_system(name)
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))
    device = parts.get("device") or toy_device()
    drafter = parts.get("drafter") or make_drafter(system, SETTINGS, device)  # type: ignore[arg-type]
    request = make_request(system, SETTINGS, "p", sampling, seed, cap)
    transport = LocalTransport(engine, INFO)
    trace = generate(prompt, request, drafter, transport, policy=make_policy(system, SETTINGS))  # type: ignore[arg-type]
    assert engine.session_count == 0
    return trace


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_system_is_lossless_when_greedy_and_its_drafter_serves_many_prompts(name: str) -> None:
    device = toy_device()  # its models are the verifier itself, so what stays unverified is right here
    drafter = make_drafter(find_system(name), SETTINGS, device)
    for prompt in (PROMPT, PROMPT[:1], [2, 2, 8, 9, 10, 3, 4]):
        trace = run(name, prompt, GREEDY, 1, 20, drafter=drafter)
        assert list(trace.tokens) == MODEL.answer(prompt, 20)
        assert (len(trace.rounds) == 19) == (name == "plain")
        assert (len(trace.rounds) == 0) == (name == "on-device")
        assert bool(trace.locals) == (not find_system(name).verifies_all)


def test_the_nine_systems_of_the_papers_table_are_there() -> None:
    table = {
        "cloud-mtp", "specedge", "specedge-pd", "specedge-eps", "hyco", "hyco-2p", "hyco-exact", "hyco-server-head",
        "on-device",
    }  # fmt: skip
    further = {"cloud-mtp-kept", "hyco-head-only", "hyco-eps-at-rejections", "hyco-typical"}  # of its other comparisons
    assert set(SYSTEMS) == table | further | {"plain", "sled", "synera"}


def test_the_systems_that_take_the_heads_loss_apart_draft_chains_over_what_is_kept() -> None:
    assert make_request(find_system("cloud-mtp"), SETTINGS, "p", PAPER, 3, 50).draft_scope == "full"
    assert make_request(find_system("cloud-mtp-kept"), SETTINGS, "p", PAPER, 3, 50).draft_scope == "artifact"
    trace = run("hyco-head-only", PROMPT, GREEDY, 1, 20)
    for entry in trace.rounds:
        assert set(entry.tree.sources) <= {Source.CHAIN}
        assert entry.tree.parents == tuple(range(-1, len(entry.tree) - 1))
        assert entry.slm_ms == 0.0
    assert {len(entry.tree) for entry in trace.rounds[:-1]} == {4} and any(entry.accepted for entry in trace.rounds)


def test_a_server_heads_chain_is_planted_and_has_no_runner_ups() -> None:
    trace = run("hyco-server-head", PROMPT, GREEDY, 1, 20)
    ids = [*PROMPT, *trace.tokens]
    for entry in trace.rounds:
        assert set(entry.tree.sources) <= {Source.CHAIN, Source.SLM} and entry.drafted == 0
        chain = [t for t, s in zip(entry.tree.tokens, entry.tree.sources, strict=True) if s == Source.CHAIN]
        assert chain == MODEL.greedy(ids[: entry.length], len(chain), RESTRICTED_IDS)
    assert sum(entry.tree.sources.count(Source.CHAIN) for entry in trace.rounds) > 2 * len(trace.rounds)
    assert {entry.tree.sources[row] for entry in trace.rounds for row in entry.accepted} == {Source.CHAIN, Source.SLM}


def test_sled_ends_its_chain_where_the_slm_is_not_sure() -> None:
    trace = run("sled", PROMPT, GREEDY, 1, 40)
    lengths = set()
    for entry in trace.rounds:
        confidence = np.diff([0.0, *entry.tree.log_probs])
        assert (confidence[:-1] >= math.log(0.3)).all()
        assert confidence[-1] < math.log(0.3) or len(entry.tree) == 5
        assert entry.tree.parents == tuple(range(-1, len(entry.tree) - 1))
        lengths.add(len(entry.tree))
    assert len(lengths) > 1


def another_slm() -> Device:
    """An SLM that is wrong now and then: half another model."""
    return Device(ScriptedHead(MODEL), ScriptedSlm(MixedModel(), KEEP, rows=12), HANDOFF, KEEP)


class MixedModel(ToyLanguageModel):
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return super().logits(ids) if len(ids) % 3 else ToyLanguageModel(seed=77).logits(ids)


def test_synera_marks_what_it_keeps_and_verifies_the_rest_behind_it() -> None:
    trace = run("synera", PROMPT, GREEDY, 1, 60, device=another_slm())
    ids = [*PROMPT, *trace.tokens]
    committed = [trace.primes[0].root]
    steps = sorted([*trace.rounds, *trace.locals], key=lambda step: step.start_ms)
    for step in steps:
        committed += step.tokens
    assert committed == list(trace.tokens)
    unverified = [token for step in trace.locals for token in step.tokens]
    assert 5 < len(unverified) < 60
    assert [token for entry in trace.rounds for token in entry.kept] == unverified[: sum(
        len(entry.kept) for entry in trace.rounds)]  # fmt: skip
    assert max(len(entry.kept) for entry in trace.rounds) <= SETTINGS.drafting.synera.unverified
    for step in trace.locals:
        assert [step.tree.tokens[row] for row in step.kept] == list(step.tokens)
        confidence = np.diff([0.0, *step.tree.log_probs])[: len(step.kept)]
        assert (confidence >= math.log(0.3)).all()
    # every verified token is the verifier's own choice behind what was kept
    for entry in trace.rounds:
        context = ids[: entry.length + len(entry.kept)]
        assert list(entry.tokens) == MODEL.greedy(context, len(entry.tokens))
    assert list(trace.tokens) != MODEL.answer(PROMPT, 60)  # and what was kept is not: no losslessness


@pytest.mark.parametrize("name", ["synera", "on-device"])
@pytest.mark.parametrize("seed", range(6))
def test_a_stop_token_or_the_cap_ends_an_answer_on_the_device(name: str, seed: int) -> None:
    model = ToyLanguageModel(seed=seed, stop_bias=3.0)
    device = Device(ScriptedHead(model), ScriptedSlm(model, KEEP), HANDOFF, KEEP)
    for cap in (3, 30):
        system = find_system(name)
        engine = Engine(lambda: ScriptedSession(model), FACTS, Limits(prompt_limit=64))
        request = make_request(system, SETTINGS, "p", GREEDY, 1, cap)
        drafter, policy = make_drafter(system, SETTINGS, device), make_policy(system, SETTINGS)
        trace = generate(PROMPT, request, drafter, LocalTransport(engine, INFO), policy=policy)
        assert list(trace.tokens) == model.answer(PROMPT, cap)
        assert trace.finished == ("stop" if trace.tokens[-1] == STOP_ID else "length")
        assert engine.session_count == 0


def test_unverified_tokens_are_sent_again_as_prompt_when_the_session_was_lost() -> None:
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=128))
    system = find_system("synera")
    request = make_request(system, SETTINGS, "p", GREEDY, 1, 60)
    drafter, policy = make_drafter(system, SETTINGS, another_slm()), make_policy(system, SETTINGS)
    generation = Generation(PROMPT, request, drafter, LocalTransport(engine, INFO), policy=policy)
    known: tuple[int, ...] = ()
    while not generation.finished:
        for name in engine.held():
            engine.close(name)
        generation.step()  # finds its session lost
        generation.step()
        assert generation.ids[: len(known)] == known
        known = generation.ids
        if not generation.finished:
            generation.step()
    trace = generation.trace()
    assert len(trace.tokens) == 60 and len(trace.primes) > 3
    assert sum(len(entry.kept) for entry in trace.rounds) > 0


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
