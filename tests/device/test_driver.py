"""The device's loop: nothing committed is lost or changed, whatever is drafted and whenever the server forgets."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.device.drafters import Draft, NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.kv_state import check_reply
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.trace import from_lines, to_lines
from hyco_export.protocol.tree import EMPTY_TREE, ROOT, Source, Tree
from tests.support.oracle import OracleDrafter
from tests.support.scripted import (
    STOP_ID,
    VOCAB_SIZE,
    ScriptedHead,
    ScriptedServer,
    ScriptedSlm,
    ToyLanguageModel,
    hybrid_of,
)

PROMPT = [5, 9, 2, 7]
NO_STOP = -1e9


def request(max_new_tokens: int = 24, **changes: object) -> Request:
    base = Request("test", "p0", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 7, max_new_tokens)
    return msgspec.structs.replace(base, **changes)


class RandomTrees:
    """Drafts random trees, right and wrong ones mixed."""

    def __init__(self, model: ToyLanguageModel, seed: int) -> None:
        self._model = model
        self._generator = np.random.default_rng(seed)

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        contexts = {ROOT: list(ids)}
        for row in range(int(self._generator.integers(0, 10))):
            parent = int(self._generator.integers(ROOT, row))
            right = self._model.greedy(contexts[parent], 1)[0]
            token = right if self._generator.random() < 0.6 else int(self._generator.integers(VOCAB_SIZE))
            if (parent, token) in set(zip(parents, tokens, strict=True)):
                token = next(t for t in range(VOCAB_SIZE) if (parent, t) not in set(zip(parents, tokens, strict=True)))
            tokens.append(token)
            parents.append(parent)
            contexts[row] = [*contexts[parent], token]
        return Draft(Tree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), (Source.SLM,) * len(tokens)))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass


class Slow(ScriptedServer):
    """Every call takes 30 ms, of which it says 12 are its own."""

    now_s = 0.0

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        self.now_s += 0.03
        return msgspec.structs.replace(super().prime(request), server_ms=12.0)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        self.now_s += 0.03
        return msgspec.structs.replace(super().verify(session, round_number, request), server_ms=12.0)


def test_drafters_hear_how_long_a_reply_was_on_its_way() -> None:
    heard: list[float] = []

    class Listening(NullDrafter):
        def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
            heard.append(given.link_ms)

    server = Slow(ToyLanguageModel(stop_bias=NO_STOP))
    generate(PROMPT, request(4), Listening(), server, lambda: server.now_s)
    assert heard == pytest.approx([18.0, 18.0])  # after the last round nothing is drafted


def test_null_drafter_commits_one_token_a_round() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    trace = generate(PROMPT, request(24), NullDrafter(), ScriptedServer(model))
    assert list(trace.tokens) == model.answer(PROMPT, 24)
    assert [len(entry.tokens) for entry in trace.rounds] == [1] * 23
    assert trace.finished == "length"


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_oracle_drafter_reaches_depth_plus_one(depth: int) -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    full_rounds = 5
    cap = 1 + full_rounds * (depth + 1)
    trace = generate(PROMPT, request(cap), OracleDrafter(model.greedy, depth), ScriptedServer(model))
    assert list(trace.tokens) == model.answer(PROMPT, cap)
    assert [len(entry.tokens) for entry in trace.rounds] == [depth + 1] * full_rounds


def test_server_side_drafting_needs_no_tree() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    server = ScriptedServer(model, handoffs=False)
    trace = generate(PROMPT, request(21, draft_side="server", draft_steps=4), NullDrafter(), server)
    assert list(trace.tokens) == model.answer(PROMPT, 21)
    assert [(entry.drafted, len(entry.tree), len(entry.tokens)) for entry in trace.rounds] == [(4, 0, 5)] * 4


@pytest.mark.parametrize("seed", range(4))
def test_stops_at_the_stop_id_even_inside_an_accepted_path(seed: int) -> None:
    model = ToyLanguageModel(seed=seed, stop_bias=3.0)
    expected = model.answer(PROMPT, 60)
    assert expected[-1] == STOP_ID
    trace = generate(PROMPT, request(60), OracleDrafter(model.greedy, 5), ScriptedServer(model))
    assert list(trace.tokens) == expected
    assert trace.finished == "stop"


def test_an_answer_of_one_token_needs_no_round() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    server = ScriptedServer(model)
    trace = generate(PROMPT, request(1), OracleDrafter(model.greedy, 3), server)
    assert trace.rounds == ()
    assert list(trace.tokens) == model.answer(PROMPT, 1)
    assert server.closed == ["session-1"]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), cap=st.integers(1, 30))
def test_greedy_text_is_plain_greedy_for_random_trees(seed: int, cap: int) -> None:
    model = ToyLanguageModel(seed=seed, stop_bias=0.5)
    trace = generate(PROMPT, request(cap), RandomTrees(model, seed), ScriptedServer(model))
    assert list(trace.tokens) == model.answer(PROMPT, cap)
    assert [token for entry in trace.rounds for token in entry.tokens] == list(trace.tokens[1:])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    prompt_length=st.integers(1, 12),
    error_every=st.integers(1, 5),
    rows=st.integers(8, 14),
    context=st.sampled_from([3, 6, 1 << 20]),
)
def test_greedy_text_is_plain_greedy_for_the_hybrid_drafter(
    seed: int, prompt_length: int, error_every: int, rows: int, context: int
) -> None:
    model = ToyLanguageModel(seed=seed, stop_bias=0.0)
    prompt = [int(t) for t in np.random.default_rng(seed).integers(2, VOCAB_SIZE, prompt_length)]
    keep = np.array([token for token in range(VOCAB_SIZE) if token % 5 != 3])
    head, slm = ScriptedHead(model, error_every=error_every), ScriptedSlm(model, keep, rows, context)
    trace = generate(prompt, request(30), hybrid_of(head, slm, keep), ScriptedServer(model))
    assert list(trace.tokens) == model.answer(prompt, 30)
    committed = [*prompt, *trace.tokens]
    # what the SLM holds is a stretch of the committed ids, at its absolute place
    assert slm.tokens == committed[slm.first : slm.length]
    assert slm.prefilled[0] <= context if slm.prefilled else len(trace.tokens) == 1


def test_hybrid_drafter_accepts_runner_ups_and_slm_leaves() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    keep = np.arange(VOCAB_SIZE)
    head, slm = ScriptedHead(model, error_every=3), ScriptedSlm(model, keep)
    trace = generate(PROMPT[:2], request(8), hybrid_of(head, slm, keep), ScriptedServer(model))
    sources = {entry.tree.sources[row] for entry in trace.rounds for row in entry.accepted}
    assert sources == {Source.CHAIN, Source.RUNNER_UP, Source.SLM}
    assert 1 + len(PROMPT[:2]) + 4 + 2 >= max(slm.widths)  # catch-up is at most one leaf after the first round
    assert slm.prefilled == [2]  # the prompt once, and nothing after


@pytest.mark.parametrize("forget_before", [[1], [2, 3], [1, 2, 3, 4], [5]])
def test_a_lost_session_is_primed_again_behind_the_committed_ids(forget_before: list[int]) -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    keep = np.arange(VOCAB_SIZE)
    head, slm = ScriptedHead(model), ScriptedSlm(model, keep)
    server = ScriptedServer(model, forget_before=forget_before)
    trace = generate(PROMPT, request(30), hybrid_of(head, slm, keep), server)
    expected = model.answer(PROMPT, 30)
    assert list(trace.tokens) == expected
    assert len(server.primes) == 1 + len(forget_before) == len(trace.primes) == head.resets
    for primed in server.primes:
        assert primed.prompt == [*PROMPT, *expected][: len(primed.prompt)]
        assert primed.continue_from == len(primed.prompt) - len(PROMPT)


def test_other_refusals_end_the_generation_and_free_the_session() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    server = ScriptedServer(model)
    duplicate = Tree((4, 4), (ROOT, ROOT), (0.0, 0.0), (Source.SLM, Source.SLM))

    class Duplicates(NullDrafter):
        def propose(self, ids: Sequence[int]) -> Draft:
            return Draft(duplicate)

    with pytest.raises(ProtocolError, match="stands twice") as refusal:
        generate(PROMPT, request(), Duplicates(), server)
    assert refusal.value.code == "duplicate_sibling"
    assert server.closed == ["session-1"]


def test_missing_handoff_names_the_remedy() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    keep = np.arange(VOCAB_SIZE)
    drafter = hybrid_of(ScriptedHead(model), ScriptedSlm(model, keep), keep)
    with pytest.raises(ProtocolError, match=r"no hand-off \(start the server on the run folder"):
        generate(PROMPT, request(), drafter, ScriptedServer(model, handoffs=False))


REPLY = wire.VerifyReply(1, 3, [0, 1], [True, True], [4, 5, 6], "", None, 0, 1.0)
SENT = Draft(Tree((4, 5, 5), (ROOT, 0, ROOT), (0.0,) * 3, (Source.CHAIN,) * 3))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"round": 2}, "round_mismatch"),
        ({"tokens": []}, "empty_round"),
        ({"accepted": [0, 2]}, "path_mismatch"),
        ({"accepted": [1, 0]}, "path_mismatch"),
        ({"accepted": [0, 7]}, "path_mismatch"),
        ({"tokens": [4, 9, 6]}, "path_mismatch"),
        ({"tokens": [4, 5]}, "path_mismatch"),
        ({"tokens": [4], "finished": "length"}, None),
        ({"drawn": [True]}, "path_mismatch"),
        ({"drafted": 4, "accepted": [0, 3]}, "path_mismatch"),  # a tree was sent: the rows are its own
    ],
)
def test_a_reply_must_fit_what_was_sent(changes: dict[str, object], code: str | None) -> None:
    reply = msgspec.structs.replace(REPLY, **changes)
    if code is None:
        check_reply(reply, 3, SENT.tree)
        return
    with pytest.raises(ProtocolError) as refusal:
        check_reply(reply, 3, SENT.tree)
    assert refusal.value.code == code


def test_trace_survives_json_lines_and_tells_times_apart() -> None:
    model = ToyLanguageModel(stop_bias=NO_STOP)
    ticks = iter(range(10_000))
    drafter, server = OracleDrafter(model.greedy, 2), ScriptedServer(model)
    traces = [generate(PROMPT, request(9, prompt_id=name), drafter, server, lambda: next(ticks)) for name in ("a", "b")]
    assert list(from_lines([line for trace in traces for line in to_lines(trace)])) == traces
    assert traces[0].rounds[0].wait_ms == traces[0].rounds[0].draft_ms == 1000.0  # one tick apart
    assert traces[0].first_token_ms < traces[0].rounds[0].start_ms < traces[0].total_ms


def test_empty_tree_constant_is_what_plain_decoding_sends() -> None:
    server = ScriptedServer(ToyLanguageModel(stop_bias=NO_STOP))
    generate(PROMPT, request(3), NullDrafter(), server)
    assert [(message.tokens, message.parents) for message in server.requests] == [([], [])] * 2
    assert NullDrafter().propose(PROMPT).tree == EMPTY_TREE


def test_a_server_that_ignores_the_token_cap_is_stopped() -> None:
    class Endless(ScriptedServer):
        def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
            return wire.VerifyReply(wire.PROTOCOL_VERSION, round_number, [], [], [2], "", None, 0, 1.0)

    model = ToyLanguageModel(stop_bias=NO_STOP)
    with pytest.raises(ProtocolError, match="3 new tokens, asked for 2 at most"):
        generate(PROMPT, request(2), NullDrafter(), Endless(model))


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 1 << 40])
@pytest.mark.parametrize("call", ["prime", "verify"])
@pytest.mark.parametrize("place", ["committed", "chain"])
def test_ids_outside_the_vocabulary_reach_no_model_of_the_device(place: str, call: str, token: int) -> None:
    class Wild(ScriptedServer):
        def prime(self, asked: wire.PrimeRequest) -> wire.PrimeReply:
            reply = super().prime(asked)
            wild = {"root": token} if place == "committed" else {"chain": [4, token]}
            return msgspec.structs.replace(reply, **wild) if call == "prime" else reply

        def verify(self, session: str, round_number: int, asked: wire.VerifyRequest) -> wire.VerifyReply:
            reply = super().verify(session, round_number, asked)
            wild = {"tokens": [token]} if place == "committed" else {"chain": [4, token]}
            return msgspec.structs.replace(reply, **wild)

    asked = msgspec.structs.replace(request(9), vocab_size=VOCAB_SIZE)
    with pytest.raises(ProtocolError, match=f"the server sent the token {token}, which is outside") as refusal:
        generate(PROMPT, asked, NullDrafter(), Wild(ToyLanguageModel(stop_bias=NO_STOP)))
    assert refusal.value.code == "token_range"
