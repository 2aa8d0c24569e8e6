"""The MTP head's K drafting steps as one static network (HyCo, §3.1 and Appendix A).

Follows transformers' `Gemma4AssistantForCausalLM`: all steps at the root's one position, over one window of K/V rows
that they only read; step 1 takes e(root) and h from the hand-off, step k + 1 the table's embedding of its own token and
its own projected state. The output layer is untied and holds the kept rows only; no soft-cap.

Legend: R roots (1 on the device; calibration and the float reference run many roots of a sequence at once), W ring
slots, H the verifier's hidden size, M the head's, A query heads, N kv heads, d head dim, C kept tokens.
Names of inputs and outputs: `core.device_spec`; with R > 1 outputs are [K * R], step by step.
"""

from typing import Generic

import msgspec

from hyco_export.core.handoff import LAYER_TYPES, HiddenNorm, KvShape
from hyco_export.core.network.blocks import AttentionShape, Ops, T, attend, gated_mlp, rotate

OUTPUT_LAYER = "lm_head"  # weight [C, M]
PRE_PROJECTION = "pre_projection"  # weight [M, 2 H]: embedding half, state half
EMBEDDING_HALF = f"{PRE_PROJECTION}.embedding"  # weight [M, H], its first half, where the two are apart
STATE_HALF = f"{PRE_PROJECTION}.state"  # weight [M, H], its second half
POST_PROJECTION = "post_projection"  # weight [H, M]
LAST_NORM = "norm"  # vector [M], after the last layer
FINAL_NORM = "final_norm"  # vector [H], the verifier's, used where h travels from before it
TABLE = "kept_embeddings"  # table [C, H], the embedding's factor inside
PROJECTED_TABLE = "projected_embeddings"  # table [C, M]: the same rows times the embedding half


def logits_name(step: int) -> str:
    """The logits [R, C] of a step 1 .. K."""
    return f"step{step}.logits"


class HeadLayer(msgspec.Struct, frozen=True):
    """One decoder layer; it stores no K/V. `scalar` multiplies its result."""

    layer_type: str
    heads: int
    kv: KvShape
    scalar: float


class HeadArchitecture(msgspec.Struct, frozen=True):
    """The head's shape as its checkpoint gives it. `spans`: see `core.ring.visible`, query = the root."""

    backbone: int  # H
    width: int  # M
    vocab_size: int
    epsilon: float
    layers: tuple[HeadLayer, ...]
    spans: dict[str, int | None]
    inv_freq: dict[str, tuple[float, ...]]

    def kv_shape(self, layer_type: str) -> KvShape:
        """K/V of one layer type."""
        return next(layer.kv for layer in self.layers if layer.layer_type == layer_type)


class HeadNetwork(msgspec.Struct, frozen=True):
    """The head as the device runs it: K steps, S of them with a runner-up, over W positions.

    `split_projection`: embedding and state go through a matrix each, with encodings of their own.
    `projected_table`: steps 2 .. K look up rows that went through the pre-projection's embedding half already. The
    root's own embedding comes from the hand-off and still goes through that half.
    """

    architecture: HeadArchitecture
    steps: int
    runner_up_steps: int
    window: int
    hidden_norm: HiddenNorm
    final_epsilon: float  # of the verifier's final norm
    projected_table: bool = False
    split_projection: bool = False

    @property
    def joins_inputs(self) -> bool:
        """Whether embedding and state share an encoding, for the whole pre-projection."""
        return not (self.projected_table or self.split_projection)

    def with_window(self, window: int) -> "HeadNetwork":
        """The same head over another number of ring slots."""
        return msgspec.structs.replace(self, window=window)


class _Drafting(Generic[T]):
    """The inputs that all steps share, declared once in the device's order."""

    def __init__(self, ops: Ops[T], network: HeadNetwork, rows: int) -> None:
        self.ops = ops
        self.network = network
        self.rows = rows
        architecture = network.architecture
        self.e = ops.input("e", (rows, architecture.backbone))
        self.h = ops.input("h", (rows, architecture.backbone))
        self.rotary: dict[str, tuple[T, T]] = {}  # cos, sin [R, 1, d]
        self.keys: dict[str, T] = {}  # [N, d, W]
        self.values: dict[str, T] = {}  # [N, W, d]
        self.masks: dict[str, T] = {}  # [R, W]
        for layer_type in LAYER_TYPES:
            self._declare(layer_type, architecture.kv_shape(layer_type))

    def _declare(self, layer_type: str, kv: KvShape) -> None:
        ops, window = self.ops, self.network.window
        tables = [ops.input(f"{kind}.{layer_type}", (self.rows, kv.dim)) for kind in ("cos", "sin")]
        cos, sin = (
            ops.reshape(f"{kind}.{layer_type}.by_row", table, (self.rows, 1, kv.dim))
            for kind, table in zip(("cos", "sin"), tables, strict=True)
        )
        self.rotary[layer_type] = (cos, sin)
        keys = ops.input(f"k.{layer_type}", (kv.heads, window, kv.dim))
        self.values[layer_type] = ops.input(f"v.{layer_type}", (kv.heads, window, kv.dim))
        self.masks[layer_type] = ops.input(f"mask.{layer_type}", (self.rows, window))
        self.keys[layer_type] = ops.transpose(f"k.{layer_type}.transposed", keys, (0, 2, 1))


def build(ops: Ops[T], network: HeadNetwork, rows: int = 1) -> None:
    """K drafting steps: outputs `chain` int32 [K * R], and `runner_up` [S * R] if there are any; kept rows both."""
    drafting = _Drafting(ops, network, rows)
    embedding, state = drafting.e, drafting.h
    mix, table = (_joined if network.joins_inputs else _summed), TABLE
    if network.projected_table:
        mix, table = _added, PROJECTED_TABLE
    if network.hidden_norm == "pre":
        wide = ops.convert("h.wide", state, "h.wide")  # from the hand-off's 8 bits to 16
        state = ops.rms_norm("h.normed", wide, FINAL_NORM, network.final_epsilon)
    if network.projected_table:
        embedding = ops.linear("e.projected", ops.convert("e.wide", embedding, "e.wide"), EMBEDDING_HALF)
    chain, runner_ups = [], []
    for step in range(1, network.steps + 1):
        at = f"step{step}"
        last = _step(drafting, at, mix(ops, at, embedding, state))
        logits = ops.linear(logits_name(step), last, OUTPUT_LAYER)  # [R, C]
        chain.append(ops.argmax(f"{at}.token", logits))
        if step <= network.runner_up_steps:
            others = ops.exclude(f"{at}.others", logits, chain[-1])
            runner_ups.append(ops.argmax(f"{at}.second", others))
        if step < network.steps:
            embedding = ops.lookup(f"{at}.embedding", table, chain[-1])
            state = ops.linear(f"{at}.state", last, POST_PROJECTION)
    ops.output("chain", ops.concat("chain", chain, 0))
    if runner_ups:
        ops.output("runner_up", ops.concat("runner_up", runner_ups, 0))


def _joined(ops: Ops[T], at: str, embedding: T, state: T) -> T:
    """What enters the layers [R, M]: embedding [R, H] and state [R, H] side by side, projected."""
    joined = [
        ops.convert(f"{at}.{part}", x, f"{at}.joined") for part, x in (("embedded", embedding), ("carried", state))
    ]
    return ops.linear(f"{at}.mixed", ops.concat(f"{at}.joined", joined, 1), PRE_PROJECTION)


def _summed(ops: Ops[T], at: str, embedding: T, state: T) -> T:
    """The same by a matrix for each of the two."""
    halves = [
        ops.linear(f"{at}.mixed.{part}", ops.convert(f"{at}.{part}", x, f"{at}.{part}"), weight)
        for part, x, weight in (("embedded", embedding, EMBEDDING_HALF), ("carried", state, STATE_HALF))
    ]
    return ops.add(f"{at}.mixed", *halves)


def _added(ops: Ops[T], at: str, embedding: T, state: T) -> T:
    """The same for an embedding [R, M] that went through its half of the projection already."""
    carried = ops.linear(f"{at}.projected", ops.convert(f"{at}.carried", state, f"{at}.carried"), STATE_HALF)
    return ops.add(f"{at}.mixed", embedding, carried)


def _step(drafting: _Drafting[T], at: str, hidden: T) -> T:
    """What enters the layers [R, M] -> last normed hidden state [R, M]."""
    ops, architecture = drafting.ops, drafting.network.architecture
    for index, layer in enumerate(architecture.layers):
        hidden = _layer(drafting, f"{at}.layers.{index}", f"layers.{index}", layer, hidden)
    return ops.rms_norm(f"{at}.final", hidden, LAST_NORM, architecture.epsilon)


def _layer(drafting: _Drafting[T], at: str, weights: str, layer: HeadLayer, hidden: T) -> T:
    """hidden [R, M] -> [R, M]; transformers' `Gemma4TextDecoderLayer` with shared K/V, without experts."""
    ops, epsilon = drafting.ops, drafting.network.architecture.epsilon
    x = ops.rms_norm(f"{at}.attention.in", hidden, f"{weights}.input_layernorm", epsilon)
    x = _attention(drafting, f"{at}.attention", f"{weights}.self_attn", layer, x)
    x = ops.rms_norm(f"{at}.attention.normed", x, f"{weights}.post_attention_layernorm", epsilon)
    hidden = ops.add(f"{at}.attended", hidden, x)
    x = ops.rms_norm(f"{at}.mlp.in", hidden, f"{weights}.pre_feedforward_layernorm", epsilon)
    x = gated_mlp(ops, f"{at}.mlp", x, f"{weights}.mlp")
    x = ops.rms_norm(f"{at}.mlp.normed", x, f"{weights}.post_feedforward_layernorm", epsilon)
    hidden = ops.add(f"{at}.out", hidden, x)
    return hidden if layer.scalar == 1.0 else ops.scale(f"{at}.scaled", hidden, layer.scalar)


def _attention(drafting: _Drafting[T], at: str, weights: str, layer: HeadLayer, x: T) -> T:
    """x [R, M] -> [R, M]; queries of the root's position over the window."""
    ops, rows, window = drafting.ops, drafting.rows, drafting.network.window
    shape = (rows, layer.heads, layer.kv.dim)
    query = ops.reshape(f"{at}.q.heads", ops.linear(f"{at}.q", x, f"{weights}.q_proj"), shape)
    query = ops.rms_norm(f"{at}.q.normed", query, f"{weights}.q_norm", drafting.network.architecture.epsilon)
    query = rotate(ops, f"{at}.q.rotated", query, *drafting.rotary[layer.layer_type], shape)
    mixed = attend(
        ops,
        at,
        query,
        drafting.keys[layer.layer_type],
        drafting.values[layer.layer_type],
        drafting.masks[layer.layer_type],
        AttentionShape(rows, layer.heads, layer.kv.heads, layer.kv.dim),
        window,
    )
    return ops.linear(f"{at}.out", mixed, f"{weights}.o_proj")
