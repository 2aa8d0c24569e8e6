"""Random histories of several clients and one engine: lost replies, restarts, expiry, faults of the model, callers that
hang up, clients that come and go, one after the other and several in one pass.

Whatever happens, both sides hold the same ids, no committed token changes, greedy text is plain greedy text, and every
session that the engine opened is closed in the end, with its memory given back. `HYCO_HISTORIES` says how many
histories are tried (`make histories`: 10,000).
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from hyco_export.core.recipe import SlmChain, Synera
from hyco_export.device.drafters import (
    Drafter,
    HybridDrafter,
    NullDrafter,
    ProactiveSpecEdgeDrafter,
    SlmChainDrafter,
    TreeRule,
)
from hyco_export.device.driver import Generation
from hyco_export.device.interfaces import Request
from hyco_export.device.kv_state import HeadState, ReplyChain
from hyco_export.device.offload import KeepConfident
from hyco_export.device.tree_builder import SlmState
from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.server.admission import Batching, Limits
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.interfaces import Check, Prefill, SequentialModels
from tests.support.oracle import OracleDrafter
from tests.support.scripted import (
    FACTS,
    HANDOFF,
    INFO,
    STOP_ID,
    VOCAB_SIZE,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
    ToyLanguageModel,
)

MODEL = ToyLanguageModel(seed=11, stop_bias=0.0)
LIMITS = Limits(sessions=64, prompt_limit=64, idle_s=10.0)
KEEP = np.arange(VOCAB_SIZE)
CAP = 20
MOST_CLIENTS = 4  # few, so that much happens to each
KINDS = ("plain", "oracle", "hybrid", "server", "reply", "proactive", "keeping")
RULES = {
    "exact": wire.EXACT,
    "epsilon": wire.Acceptance("epsilon", 0.1),
    "epsilon-at-rejections": wire.Acceptance("epsilon-at-rejections", 0.1, True),
    "typical": wire.Acceptance("typical", 1.0),
}
RULE = TreeRule(math.log(0.66), 8, 8)
SIDES = {"server": "server", "reply": "reply"}


BATCHING = Batching(sessions=3, wait_ms=1.0, prefill_rows=5)  # prompts of several pieces, passes that wait for company


class FragileModels(SequentialModels):
    """Fails in the next pass when told to; counts how many sessions its passes held."""

    def __init__(self) -> None:
        super().__init__(position_bytes=1)
        self.fail_next = False
        self.largest_pass = 0

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        self.largest_pass = max(self.largest_pass, len(parts))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is lost")
        return super().forward(parts)


class LossyTransport(LocalTransport):
    """Loses the next reply of a call when told to: the server has done the work, the device does not know."""

    lose_reply = False

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        return self._deliver(super().prime(request))

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        return self._deliver(super().verify(session, round_number, request))

    def _deliver(self, reply):  # type: ignore[no-untyped-def]  # any reply, as it is
        if self.lose_reply:
            self.lose_reply = False
            raise ServerError("the reply was lost")
        return reply


class Client:
    """One generation, its transport, and what it had committed when it was last looked at."""

    def __init__(
        self, engine: Engine, kind: str, prompt: list[int], temperature: float, rule_name: str, seed: int
    ) -> None:
        self.transport = LossyTransport(engine, INFO)
        self.prompt = prompt
        self.greedy = temperature == 0.0
        self.keeps = kind == "keeping"
        request = Request(
            kind, "p", wire.Sampling(temperature, 0, 1.0), RULES[rule_name], seed, CAP, SIDES.get(kind, "device"),
            4 if kind in SIDES else 0, "head" if kind == "hybrid" else "", stop_ids=(STOP_ID,),
        )  # fmt: skip
        policy = (
            KeepConfident(Synera(0.3, unverified=5)) if kind == "keeping" else None
        )  # its SLM is the verifier: greedy text stays plain
        self.generation = Generation(prompt, request, make_drafter(kind), self.transport, policy=policy)
        self.known = self.generation.ids


def make_drafter(kind: str) -> Drafter:
    if kind == "oracle":
        return OracleDrafter(MODEL.greedy, 3)
    if kind == "hybrid":
        head, slm = ScriptedHead(MODEL), ScriptedSlm(MODEL, KEEP)
        return HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, KEEP, {STOP_ID}), RULE)
    slm_feed = SlmState(ScriptedSlm(MODEL, KEEP), KEEP, {STOP_ID})
    if kind == "reply":
        return HybridDrafter(ReplyChain(), slm_feed, RULE)
    if kind == "proactive":
        return ProactiveSpecEdgeDrafter(slm_feed, msgspec.structs.replace(RULE, passes=2))
    if kind == "keeping":
        return SlmChainDrafter(slm_feed, SlmChain(0.3, 4))
    return NullDrafter()


class Histories(RuleBasedStateMachine):
    """Rules are what can happen to a client or to the server."""

    clients: Bundle[Client] = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[ScriptedSession] = []
        self.now_s = 0.0
        self.models = FragileModels()
        self.engine = Engine(self._open, FACTS, LIMITS, now=lambda: self.now_s, models=self.models, batching=BATCHING)
        self.all: list[Client] = []
        self.pool = ThreadPoolExecutor(MOST_CLIENTS)

    def _open(self) -> ScriptedSession:
        self.opened.append(ScriptedSession(MODEL))
        return self.opened[-1]

    @precondition(lambda self: len(self.all) < MOST_CLIENTS)
    @rule(
        target=clients,
        kind=st.sampled_from(KINDS),
        prompt=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=12),
        temperature=st.sampled_from([0.0, 1.0]),
        rule_name=st.sampled_from(list(RULES)),
        seed=st.integers(0, 99),
    )
    def arrive(self, kind: str, prompt: list[int], temperature: float, rule_name: str, seed: int) -> Client:
        client = Client(self.engine, kind, prompt, temperature, rule_name, seed)
        self.all.append(client)
        return client

    @rule(client=clients, steps=st.integers(1, 2))
    def go_on(self, client: Client, steps: int) -> None:
        for _ in range(steps):
            if not client.generation.finished:
                client.generation.step()

    @precondition(lambda self: len(self.all) > 1)
    @rule(steps=st.integers(1, 3))
    def go_on_together(self, steps: int) -> None:
        for _ in range(steps):
            active = [client for client in self.all if not client.generation.finished]
            list(self.pool.map(lambda client: client.generation.step(), active))

    @precondition(lambda self: len(self.all) > 0)
    @rule()
    def fail(self) -> None:
        """The model fails in a pass: its sessions hear of it, and prime again."""
        active = [client for client in self.all if not client.generation.finished]
        self.models.fail_next = bool(active)

        def step(client: Client) -> str:
            try:
                client.generation.step()
            except ProtocolError as refusal:
                return refusal.code
            return ""

        codes = list(self.pool.map(step, active))
        # a step that only found its session lost has made no pass
        assert set(codes) <= {"", "model_fault"} and ("model_fault" in codes or self.models.fail_next or not active)
        self.models.fail_next = False

    @rule(prompt=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=12))
    def hang_up(self, prompt: list[int]) -> None:
        """A caller that nobody hears of again."""
        request = wire.PrimeRequest(1, prompt, wire.PAPER_SAMPLING, wire.EXACT, 1, CAP, "device", 0, "")
        held = self.engine.session_count, self.engine.reserved_bytes
        with suppress(ProtocolError):
            self.engine.prime(request, lambda: True)
        assert self.engine.session_count <= held[0] and self.engine.reserved_bytes <= held[1]

    @rule(client=clients, before=st.integers(0, 1))
    def lose_reply(self, client: Client, before: int) -> None:
        self.go_on(client, before)
        if client.generation.finished:
            return
        ids = client.generation.ids
        client.transport.lose_reply = True
        with suppress(ServerError):
            client.generation.step()
        if client.keeps:  # what the device committed by itself before the call stays
            assert client.generation.ids[: len(ids)] == ids
        else:
            assert client.transport.lose_reply or client.generation.ids == ids
        client.transport.lose_reply = False

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def restart(self) -> None:
        for name in self.engine.held():
            self.engine.close(name)

    @rule(client=clients)
    def leave(self, client: Client) -> None:
        client.generation.close()

    @invariant()
    def nothing_committed_changes(self) -> None:
        for client in self.all:
            ids = client.generation.ids
            assert ids[: len(client.known)] == client.known
            client.known = ids
            generated = list(ids[len(client.prompt) :])
            if client.greedy:
                assert generated == MODEL.answer(client.prompt, CAP)[: len(generated)]
            if client.generation.finished:
                assert len(generated) == CAP or generated[-1] == STOP_ID

    def teardown(self) -> None:
        for client in self.all:
            while not client.generation.finished:
                client.generation.step()
            client.generation.close()
        self.nothing_committed_changes()
        self.now_s += LIMITS.idle_s + 1.0  # sessions whose first reply was lost are nobody's: they expire
        self.engine.expire()
        assert self.engine.session_count == 0 and self.engine.reserved_bytes == 0
        assert all(session.closed for session in self.opened)
        self.pool.shutdown()
        passes.append(self.models.largest_pass)


passes: list[int] = []  # sessions in the largest pass of each history
HISTORIES = int(os.environ.get("HYCO_HISTORIES", "80"))
TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=HISTORIES, stateful_step_count=30, deadline=None)


def test_passes_of_several_sessions_occurred() -> None:
    assert max(passes) == BATCHING.sessions  # of the histories above
