"""A toy language model and everything around it that driver and server tests need: no torch, no HTTP, fully seeded.

The toy model's next-token logits are a pure function of all ids before; a wrong ancestor or a lost token changes them.
Its hand-off writes position and token into every value, so that a ring can be read back.

Legend: V vocabulary, N nodes, H hidden.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, KvRows, KvShape
from hyco_export.device.drafters import HybridDrafter, TreeRule
from hyco_export.device.interfaces import HeadDevice, HeadDraft, SlmDevice
from hyco_export.device.kv_state import HeadState
from hyco_export.device.tree_builder import SlmState
from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, check_tree, path_to
from hyco_export.protocol.wire import Traffic
from hyco_export.server.admission import Facts

STOP_ID = 1
VOCAB_SIZE = 16
HIDDEN = 4
WINDOW = 8
NODE_LIMIT = 32
KEEP_ALL = np.arange(VOCAB_SIZE)
RESTRICTED_IDS = np.array([token for token in range(VOCAB_SIZE) if token % 5 != 3])  # what a head artifact keeps
NO_TRAFFIC = Traffic(0, 0, 0, 0)
UNIT = Encoding("uint8", 1.0, 0)
HANDOFF = HandoffSpec(
    hidden=HIDDEN,
    window=WINDOW,
    hidden_norm="post",
    kv={"sliding": KvShape(1, 2), "full": KvShape(1, 2)},
    encodings=dict.fromkeys(("e", "h", "k.sliding", "v.sliding", "k.full", "v.full"), UNIT),
)
# what a server over these pieces says of itself, with a head and a keep set
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "keep", 32, 64, 4, ["exact"], "thread-cpu")


class ToyLanguageModel:
    """Next-token logits [V] float32 as a function of a context."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, seed: int = 0, stop_bias: float = -1.0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._stop_bias = stop_bias  # below 0: long answers; the answer ends by the token cap mostly

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        content = np.asarray([self._seed, *ids], dtype="<i8").tobytes()
        key = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        values = np.random.Generator(np.random.Philox(key)).normal(0.0, 2.0, self.vocab_size)
        values[STOP_ID] += self._stop_bias
        return values.astype(np.float32)

    def greedy(self, ids: Sequence[int], count: int, allowed: np.ndarray | None = None) -> list[int]:
        """The next `count` tokens, a stop id or not; the best of `allowed` each, where these are given."""
        context = list(ids)
        choice = np.arange(self.vocab_size) if allowed is None else allowed
        for _ in range(count):
            context.append(int(choice[np.argmax(self.logits(context)[choice])]))
        return context[len(ids) :]

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Plain greedy decoding: up to a stop id or the cap."""
        tokens = self.greedy(prompt, max_new_tokens)
        return tokens[: tokens.index(STOP_ID) + 1] if STOP_ID in tokens else tokens


class ScriptedSession:
    """interfaces.VerifierSession over the toy model."""

    def __init__(self, model: ToyLanguageModel) -> None:
        self._model = model
        self.ids: list[int] = []  # processed ids: the root is not among them
        self._pending: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
        self.positions = 0
        self.closed = False

    def reserve(self, positions: int) -> None:
        self.positions = positions

    def prime(self, ids: np.ndarray) -> np.ndarray:
        self.ids += [int(token) for token in ids]
        return self._model.logits(self.ids)

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        tree_tokens, tree_parents = tuple(map(int, tokens)), tuple(map(int, parents))
        self._pending = (int(root), tree_tokens, tree_parents)
        rows = [self._model.logits([*self.ids, int(root)])]
        for row in range(len(tree_tokens)):
            path = [tree_tokens[node] for node in path_to(tree_parents, row)]
            rows.append(self._model.logits([*self.ids, int(root), *path]))
        return np.stack(rows)

    def commit(self, accepted: tuple[int, ...]) -> None:
        assert self._pending is not None, "commit without verify"
        root, tokens, parents = self._pending
        assert tuple(accepted) == (path_to(parents, accepted[-1]) if accepted else ()), "accepted rows are no path"
        self.ids += [root, *(tokens[row] for row in accepted)]
        self._pending = None

    def draft(self, root: int, steps: int, restricted: bool = False) -> tuple[int, ...]:
        allowed = RESTRICTED_IDS if restricted else None
        return tuple(self._model.greedy([*self.ids, root], steps, allowed))

    def handoff(self, root: int, count: int) -> wire.Handoff:
        first = len(self.ids) - count
        rows = toy_rows(self.ids[first:], first)
        return wire.Handoff(toy_e(root).tobytes(), toy_h(self.ids).tobytes(), HANDOFF.pack_rows(rows), first)

    def close(self) -> None:
        self.closed = True


def toy_e(root: int) -> np.ndarray:
    """e(root): uint8 [H]."""
    return np.full(HIDDEN, root, np.uint8)


def toy_h(ids: Sequence[int]) -> np.ndarray:
    """h of the newest processed position: uint8 [H], a fingerprint of all processed ids."""
    return np.frombuffer(hashlib.blake2b(np.asarray(ids, "<i8").tobytes(), digest_size=HIDDEN).digest(), np.uint8)


def toy_rows(tokens: Sequence[int], first_position: int) -> KvRows:
    """K/V rows [n, 1, 2] that say (token, position mod 256); V is K + 1, `full` is `sliding` + 2."""
    base = np.array([[token, position % 256] for position, token in enumerate(tokens, first_position)], np.int64)
    base = base.reshape(-1, 1, 2)
    k = {layer_type: (base + 2 * place).astype(np.uint8) for place, layer_type in enumerate(LAYER_TYPES)}
    return KvRows(k, {layer_type: (block + 1).astype(np.uint8) for layer_type, block in k.items()})


class ScriptedServer:
    """interfaces.Transport with a greedy exact server behind it, in one class; the engine's tests use the real one.

    Args:
        model: who answers.
        forget_before: rounds (counted over all sessions, from 1) at whose arrival every session is lost.
    """

    def __init__(self, model: ToyLanguageModel, forget_before: Sequence[int] = (), handoffs: bool = True) -> None:
        self.model = model
        self.traffic = NO_TRAFFIC
        self.requests: list[wire.VerifyRequest] = []
        self.primes: list[wire.PrimeRequest] = []
        self.closed: list[str] = []
        self._forget_before = set(forget_before)
        self._handoffs = handoffs
        self._calls = 0
        self._sessions: dict[str, tuple[ScriptedSession, wire.PrimeRequest, list[int]]] = {}

    def info(self) -> wire.ServerInfo:
        raise ServerError("the scripted server has no info")

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        self.primes.append(request)
        session = ScriptedSession(self.model)
        root = int(np.argmax(session.prime(np.asarray(request.prompt))))
        ids = [*request.prompt, root]
        name = f"session-{len(self.primes)}"
        self._sessions[name] = (session, request, ids)
        finished = self._finished(request, ids)
        handoff = session.handoff(root, min(WINDOW, len(session.ids))) if self._handoffs else None
        return wire.PrimeReply(wire.PROTOCOL_VERSION, name, root, len(ids), finished, handoff, 1.0)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        self._calls += 1
        if self._calls in self._forget_before:
            self._sessions.clear()
        if session not in self._sessions:
            raise ProtocolError(wire.UNKNOWN_SESSION, f"session {session} is not here", "prime again")
        state, primed, ids = self._sessions[session]
        self.requests.append(request)
        assert (request.length, request.digest) == (len(ids), wire.committed_digest(ids)), "the two sides differ"
        check_tree(request.tokens, request.parents, self.model.vocab_size, NODE_LIMIT)
        drafted = state.draft(ids[-1], primed.draft_steps) if primed.draft_side == "server" else ()
        tokens, parents = request.tokens, request.parents
        if drafted:
            tokens, parents = list(drafted), list(range(ROOT, len(drafted) - 1))
        outputs = state.verify(ids[-1], np.asarray(tokens), np.asarray(parents))
        accepted, bonus = greedy_path(outputs, tokens, parents)
        state.commit(accepted)
        committed = [*(tokens[row] for row in accepted), bonus]
        cap = primed.max_new_tokens - (len(ids) - len(primed.prompt) + primed.continue_from)
        committed = committed[:cap]
        if STOP_ID in committed:
            committed = committed[: committed.index(STOP_ID) + 1]
        ids += committed
        finished = self._finished(primed, ids)
        handoff = None
        if self._handoffs and not finished:
            handoff = state.handoff(bonus, 1 + len(accepted))
        return wire.VerifyReply(
            wire.PROTOCOL_VERSION, round_number, list(accepted), [True] * len(accepted), committed, finished, handoff,
            len(drafted), 1.0,
        )  # fmt: skip

    def _finished(self, request: wire.PrimeRequest, ids: Sequence[int]) -> str:
        if ids[-1] == STOP_ID:
            return "stop"
        generated = len(ids) - len(request.prompt) + request.continue_from
        return "length" if generated >= request.max_new_tokens else ""

    def close_session(self, session: str) -> None:
        self.closed.append(session)
        self._sessions.pop(session, None)


def greedy_path(logits: np.ndarray, tokens: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Accepted rows and bonus of the exact rule at temperature 0; logits [N + 1, V]."""
    accepted: list[int] = []
    row = ROOT
    while True:
        drawn = int(np.argmax(logits[row + 1]))
        children = [node for node in range(len(tokens)) if parents[node] == row and tokens[node] == drawn]
        if not children:
            return tuple(accepted), drawn
        row = children[0]
        accepted.append(row)


class ScriptedHead:
    """A HeadDevice that checks every row it is given and drafts what the toy model would say, sometimes wrongly.

    Args:
        model: the language model.
        steps, runner_ups: what it drafts.
        error_every: every n-th chain token (counted over the position) is wrong; its runner-up is then right.
    """

    def __init__(self, model: ToyLanguageModel, steps: int = 4, runner_ups: int = 2, error_every: int = 3) -> None:
        self._model = model
        self._steps = steps
        self._runner_ups = runner_ups
        self._error_every = error_every
        self.tokens: dict[int, int] = {}  # position -> token, as the committed rows say
        self.resets = 0

    def reset(self) -> None:
        self.tokens = {}
        self.resets += 1

    def commit(self, rows: KvRows, first_position: int) -> None:
        tokens = [int(row[0, 0]) for row in rows.k["sliding"]]
        expected = toy_rows(tokens, first_position)
        for layer_type in LAYER_TYPES:
            assert np.array_equal(rows.k[layer_type], expected.k[layer_type]), "K rows are not those of these positions"
            assert np.array_equal(rows.v[layer_type], expected.v[layer_type]), "V rows are not those of these positions"
        self.tokens |= dict(enumerate(tokens, first_position))

    def draft(self, e: np.ndarray, h: np.ndarray, root_position: int) -> HeadDraft:
        assert max(self.tokens) == root_position - 1, "the ring does not end right before the root"
        root = int(e[0])
        known = [self.tokens[position] for position in sorted(self.tokens)]
        if min(self.tokens) == 0:  # the whole context is in the ring: h must be its fingerprint, drafts can be right
            assert np.array_equal(h, toy_h(known)), "h is not that of the newest processed position"
        chain = self._model.greedy([*known, root], self._steps)
        runner_ups = [(token + 1) % self._model.vocab_size for token in chain[: self._runner_ups]]
        for step in range(self._steps):
            if (root_position + step) % self._error_every == 0:
                right = chain[step]
                chain[step] = (right + 1) % self._model.vocab_size
                if step < self._runner_ups:
                    runner_ups[step] = right
        return HeadDraft(tuple(chain), tuple(runner_ups))

    def close(self) -> None:
        pass


class ScriptedSlm:
    """An SlmDevice whose rings hold the tokens themselves; its distribution is the toy model's, seen through them.

    Every pass is answered from the ring's content and the ancestors in the pass alone, so a wrong commit or a wrong
    parent shows in the log-probabilities. A row may be committed only where its whole context is what the ring holds.
    """

    def __init__(self, model: ToyLanguageModel, keep_ids: np.ndarray, rows: int = 12, context: int = 1 << 30) -> None:
        self._model = model
        self._keep_ids = keep_ids
        self.rows = rows
        self.context = context
        self.first = 0
        self.tokens: list[int] = []
        self.contexts: dict[int, tuple[int, ...]] = {}  # row number -> the ring's tokens and the row's path
        self.next_row = 0
        self.prefilled: list[int] = []
        self.widths: list[int] = []

    @property
    def length(self) -> int:
        return self.first + len(self.tokens)

    def reset(self, position: int = 0) -> None:
        self.first, self.tokens, self.contexts = position, [], {}

    def fits(self, tokens: np.ndarray, others: int) -> bool:
        return len(tokens) + others <= self.rows

    def prefill(self, tokens: np.ndarray) -> None:
        self.prefilled.append(len(tokens))
        self.tokens += [int(token) for token in tokens]

    def tree_pass(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        assert len(tokens) <= self.rows, "more rows than the pass has"
        self.widths.append(len(tokens))
        result = []
        for row in range(len(tokens)):
            path = [int(tokens[node]) for node in path_to(parents, row)]
            self.contexts[self.next_row + row] = (*self.tokens, *path)
            logits = self._model.logits([*self.tokens, *path])[self._keep_ids].astype(np.float64)
            result.append(logits - np.log(np.exp(logits).sum()))
        self.next_row += len(tokens)
        return np.asarray(result, dtype=np.float32)

    def commit(self, rows: np.ndarray) -> None:
        for row in rows:
            *context, token = self.contexts[int(row)]
            assert context == self.tokens, "committed rows are no path from the ring's end"
            self.tokens.append(token)

    def forget(self, before: int) -> None:
        self.contexts = {row: context for row, context in self.contexts.items() if row >= before}

    def close(self) -> None:
        pass


def hybrid_of(head: HeadDevice, slm: SlmDevice, keep_ids: np.ndarray = KEEP_ALL) -> HybridDrafter:
    """HyCo's drafter over these two, with the paper's cost of an edge and a small budget."""
    rule = TreeRule(math.log(0.66), budget=12, candidates_per_row=12)
    return HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, keep_ids, {STOP_ID}), rule)
