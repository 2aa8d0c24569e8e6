"""The SLM as a static network: one pass of R rows on top of its K/V rings (HyCo, §3.2 and Appendix A).

One definition for every SLM family: a decoder of attention and gated MLP blocks. Its options (`SlmNetwork`, `SlmLayer`)
are set by a family of `models.families`; defaults are those of Gemma 4. Embeddings and rotary tables come from the
host. Written in `Ops` alone: torch computes it, a graph writer writes it down.

A channel of the residual stream that dwarfs the others would leave them few of the steps of a 16-bit tensor. It may be
split (`SlmNetwork.copies`): the stream carries n copies of v n^-0.5 instead of v, the first in its place and the others
at the end. The sum of squares stays the same, so a norm of the stream needs another factor and epsilon only
(`split_weights`).

Legend: R rows, W ring slots of a layer type, C = W + R, H hidden, S columns of the residual stream (H without copies),
A query heads, N kv heads, d head dim, L layers, P per-layer width, V kept tokens. Names of inputs and outputs:
`core.device_spec`.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Generic

import msgspec
import numpy as np

from hyco_export.core.network.blocks import (
    Activation,
    AttentionShape,
    Ops,
    T,
    attend,
    gated_mlp,
    gelu,
    heads_first,
    rotate,
    soft_cap,
)
from hyco_export.core.network.weights import PackedMatrices, PackedMatrix, Weights

STREAM_NORMS = ("input_layernorm", "pre_feedforward_layernorm")  # of each layer, before its two blocks
ADDED_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
SPLIT = "split.factors"  # vector [H] of a network with copies
GATE = "per_layer_input_gate"  # the linear layer that reads the stream without a norm


class SlmLayer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decoder layer.

    `source` is the layer whose K/V it reads: itself if it stores its own. `values_from_keys`: V comes from the K
    projection before its norm and rotation (`attention_k_eq_v`). `scalar` multiplies the layer's result.
    `values_normed`: V has a norm without weights (Gemma 4; not Gemma 3).
    """

    index: int
    layer_type: str
    heads: int
    kv_heads: int
    dim: int
    source: int
    values_from_keys: bool
    scalar: float
    values_normed: bool = True

    @property
    def stores(self) -> bool:
        return self.source == self.index


class SlmNetwork(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything of the SLM's shape that does not depend on the number of rows.

    `query_key_norms`: queries and keys are normed by head before rotation; their weights hold the factor of the scores.
    `query_scale`: factor of the queries, where no norm can hold it.
    `post_norms`: the result of each attention and MLP block is normed before it is added.
    `copies`: how many copies the residual stream carries of a channel, where it is more than one: powers of 4.
    """

    hidden: int
    per_layer: int  # P, 0 = no per-layer embeddings
    epsilon: float
    soft_cap: float | None
    rings: dict[str, int]  # W by layer type
    spans: dict[str, int | None]  # newest positions a row may see, by layer type; None = the whole ring
    inv_freq: dict[str, tuple[float, ...]]  # rotary frequencies [d/2] by layer type
    layers: tuple[SlmLayer, ...]
    activation: Activation = "gelu"
    query_key_norms: bool = True
    query_scale: float = 1.0
    post_norms: bool = True
    copies: dict[int, int] = {}

    @property
    def stream_width(self) -> int:
        """S."""
        return len(self.stream_columns)

    @property
    def stream_columns(self) -> tuple[int, ...]:
        """[S]: the channel that each column of the residual stream is a copy of."""
        counts = sorted(self.copies.items())
        rest = (channel for channel, count in counts for _ in range(count - isqrt(count)))
        return (*self.sum_columns, *rest)

    @property
    def sum_columns(self) -> tuple[int, ...]:
        """The first columns of the stream: n^0.5 copies of every channel, whose sum is the channel."""
        further = (channel for channel, count in sorted(self.copies.items()) for _ in range(isqrt(count) - 1))
        return (*range(self.hidden), *further)

    @property
    def storing(self) -> tuple[SlmLayer, ...]:
        """The layers that have a ring."""
        return tuple(layer for layer in self.layers if layer.stores)


class _Pass(Generic[T]):
    """One pass under construction: an input is declared at its first use, so that a graph has none it does not need."""

    def __init__(self, ops: Ops[T], network: SlmNetwork, rows: int) -> None:
        self.ops = ops
        self.network = network
        self.rows = rows
        self.keys: dict[int, T] = {}  # [N, d, C] by storing layer
        self.values: dict[int, T] = {}  # [N, C, d] by storing layer
        self._inputs: dict[str, T] = {}

    def input(self, name: str, shape: tuple[int, ...]) -> T:
        if name not in self._inputs:
            self._inputs[name] = self.ops.input(name, shape)
        return self._inputs[name]

    def width(self, layer_type: str) -> int:
        """C: keys that a row can be shown, ring slots first."""
        return self.network.rings[layer_type] + self.rows

    def mask(self, layer_type: str) -> T:
        """[R, C]."""
        return self.input(f"mask.{layer_type}", (self.rows, self.width(layer_type)))

    def rotary(self, layer: SlmLayer) -> tuple[T, T]:
        """cos and sin [R, 1, d]."""
        return self._table("cos", layer), self._table("sin", layer)

    def _table(self, kind: str, layer: SlmLayer) -> T:
        name = f"{kind}.{layer.layer_type}"
        by_row = f"{name}.by_row"
        if by_row not in self._inputs:
            table = self.input(name, (self.rows, layer.dim))
            self._inputs[by_row] = self.ops.reshape(by_row, table, (self.rows, 1, layer.dim))
        return self._inputs[by_row]


def build(ops: Ops[T], network: SlmNetwork, rows: int) -> None:
    """A tree pass: from embeddings to new K/V rows and logits over the keep set."""
    current = _Pass(ops, network, rows)
    hidden = _embedded(current)
    per_layer = _per_layer_inputs(current)
    for layer in network.layers:
        hidden = _layer(current, layer, hidden, per_layer)
    final = _stream_norm(current, "final", hidden, "norm")
    if network.soft_cap is None:
        logits = ops.linear("logits", final, "lm_head")
    else:
        logits = soft_cap(ops, "logits", ops.linear("logits.raw", final, "lm_head"), network.soft_cap)
    ops.output("logits", logits)


def build_prefill(ops: Ops[T], network: SlmNetwork, rows: int) -> None:
    """A prefill pass: new K/V rows only. It ends at the last layer that stores K/V; later layers only read it."""
    current = _Pass(ops, network, rows)
    hidden = _embedded(current)
    last = network.storing[-1].index
    per_layer = _per_layer_inputs(current) if last else None
    for layer in network.layers[:last]:
        hidden = _layer(current, layer, hidden, per_layer)
    _new_rows(current, network.layers[last], _attention_input(current, network.layers[last], hidden))


def layer_results(network: SlmNetwork) -> tuple[str, ...]:
    """Names of the hidden states [R, S] after each layer of a tree pass, then of the final norm's."""
    end = "enriched" if network.per_layer else "fed"
    results = [f"layers.{layer.index}.{end if layer.scalar == 1.0 else 'scaled'}" for layer in network.layers]
    return (*results, "final")


# ---- the residual stream


def stream_tensors(network: SlmNetwork) -> tuple[str, ...]:
    """Names of the tensors [R, H] that are the stream, or are added to it, in a network without copies."""
    names = ["embeds"]
    for layer in network.layers:
        at = f"layers.{layer.index}"
        added = ("attention.normed", "mlp.normed") if network.post_norms else ("attention.out", "mlp.down")
        names += [f"{at}.{added[0]}", f"{at}.attended", f"{at}.{added[1]}", f"{at}.fed"]
        names += [f"{at}.ple.normed", f"{at}.enriched"] if network.per_layer else []
        names += [f"{at}.scaled"] if layer.scalar != 1.0 else []
    return tuple(names)


def split_weights(network: SlmNetwork, weights: Weights) -> Weights:
    """Weights of the network without copies -> with them."""
    assert isinstance(weights.matrices, PackedMatrices)
    return Weights(_split_matrices(network, weights.matrices), _split_vectors(network, weights.vectors), weights.tables)


def _split_vectors(network: SlmNetwork, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norms of the stream get [S] values: its columns have the factor n^-0.5, and its mean of squares is over S instead
    of H; values of further copies are 0: no layer reads them. Norms of what is added to the stream get the factor.
    """
    factors = np.ones(network.hidden, np.float32)
    for channel, count in network.copies.items():
        factors[channel] = count**-0.5
    found = {**vectors, SPLIT: factors}
    for name, vector in vectors.items():
        kind = name.rpartition(".")[2]
        if name == "norm" or kind in STREAM_NORMS:
            found[name] = np.zeros(network.stream_width, np.float32)
            found[name][: network.hidden] = vector / factors * np.sqrt(network.hidden / network.stream_width)
        elif kind in ADDED_NORMS:
            found[name] = vector * factors
    return found


def _split_matrices(network: SlmNetwork, matrices: PackedMatrices) -> PackedMatrices:
    """A layer that reads the stream without a norm gets a channel's column n^0.5 times, its integers as they are."""
    columns = list(network.sum_columns)

    def widened(name: str) -> bool:
        return name.endswith(GATE)

    def read(name: str) -> PackedMatrix:
        packed = matrices.packed(name)
        if not widened(name):
            return packed
        whole = packed.unpacked()
        return replace(whole, integers=np.ascontiguousarray(whole.integers[:, columns])).packed()

    shapes = {
        name: replace(shape, width=len(columns)) if widened(name) else shape for name, shape in matrices.shapes.items()
    }
    return PackedMatrices(shapes, read)


def _embedded(current: _Pass[T]) -> T:
    """The stream [R, S] before the first layer."""
    hidden = current.input("embeds", (current.rows, current.network.hidden))
    return _copied(current, "embeds", _split(current, "embeds", hidden))


def _split(current: _Pass[T], name: str, x: T) -> T:
    """x [R, H] with the factor n^-0.5 of every channel."""
    return current.ops.weigh(f"{name}.split", x, SPLIT) if current.network.copies else x


def _copied(current: _Pass[T], name: str, x: T) -> T:
    """x [R, H], factors inside, as it is added to the stream [R, S]."""
    network = current.network
    return current.ops.columns(f"{name}.copied", x, network.stream_columns) if network.copies else x


def _added(current: _Pass[T], layer: SlmLayer, block: str, raw: T, norm: str) -> T:
    """What a block with the result `raw` [R, H] adds to the stream: normed where the network has such norms."""
    name = f"layers.{layer.index}.{block}"
    if not current.network.post_norms:
        return _copied(current, name, _split(current, name, raw))
    weight = f"layers.{layer.index}.{norm}"
    x = current.ops.rms_norm(f"{name}.normed", raw, weight, current.network.epsilon)
    return _copied(current, f"{name}.normed", x)


def _stream_norm(current: _Pass[T], name: str, hidden: T, weight: str) -> T:
    """hidden [R, S] -> its norm [R, H], without copies."""
    network = current.network
    epsilon = network.epsilon * network.hidden / network.stream_width if network.copies else network.epsilon
    x = current.ops.rms_norm(name, hidden, weight, epsilon)
    return current.ops.slice(f"{name}.own", x, 1, 0, network.hidden) if network.copies else x


def _summed(current: _Pass[T], name: str, hidden: T) -> T:
    """hidden [R, S] -> the columns that a linear layer without a norm before it reads."""
    network = current.network
    return current.ops.slice(name, hidden, 1, 0, len(network.sum_columns)) if network.copies else hidden


# ---- a layer


def _layer(current: _Pass[T], layer: SlmLayer, hidden: T, per_layer: T | None) -> T:
    """hidden [R, S] -> [R, S]: one decoder layer."""
    hidden = _attention_block(current, layer, hidden)
    hidden = _mlp_block(current, layer, hidden)
    if per_layer is not None:
        hidden = _per_layer_block(current, layer, hidden, per_layer)
    if layer.scalar != 1.0:
        hidden = current.ops.scale(f"layers.{layer.index}.scaled", hidden, layer.scalar)
    return hidden


def _attention_input(current: _Pass[T], layer: SlmLayer, hidden: T) -> T:
    at = f"layers.{layer.index}"
    return _stream_norm(current, f"{at}.attention.in", hidden, f"{at}.input_layernorm")


def _attention_block(current: _Pass[T], layer: SlmLayer, hidden: T) -> T:
    """hidden + norm(attention(norm(hidden))); the outer norm where the network has it."""
    ops, at, name = current.ops, f"layers.{layer.index}", f"layers.{layer.index}.attention"
    x = _attention_input(current, layer, hidden)
    if layer.stores:
        _store(current, layer, *_new_rows(current, layer, x))
    query = ops.linear(f"{name}.q", x, f"{at}.self_attn.q_proj")
    if current.network.query_scale != 1.0:
        query = ops.scale(f"{name}.q.scaled", query, current.network.query_scale)
    mixed = attend(
        ops,
        name,
        _rotated(current, layer, f"{name}.q", query, "q_norm", layer.heads),
        current.keys[layer.source],
        current.values[layer.source],
        current.mask(layer.layer_type),
        AttentionShape(current.rows, layer.heads, layer.kv_heads, layer.dim),
        current.width(layer.layer_type),
    )
    mixed = ops.linear(f"{name}.out", mixed, f"{at}.self_attn.o_proj")
    return ops.add(f"{at}.attended", hidden, _added(current, layer, "attention", mixed, "post_attention_layernorm"))


def _rotated(current: _Pass[T], layer: SlmLayer, name: str, flat: T, norm: str, heads: int) -> T:
    """flat [R, heads * d] -> rotated [R, heads, d], normed before where the network has such norms."""
    ops, shape = current.ops, (current.rows, heads, layer.dim)
    x = ops.reshape(f"{name}.heads", flat, shape)
    if current.network.query_key_norms:
        weight = f"layers.{layer.index}.self_attn.{norm}"
        x = ops.rms_norm(f"{name}.normed", x, weight, current.network.epsilon)
    return rotate(ops, f"{name}.rotated", x, *current.rotary(layer), shape)


def _new_rows(current: _Pass[T], layer: SlmLayer, x: T) -> tuple[T, T]:
    """K and V rows [N, R, d] of this pass, in the encoding of their ring; both are outputs of the graph."""
    ops, rows, heads = current.ops, current.rows, layer.kv_heads
    at, name = f"layers.{layer.index}", f"layers.{layer.index}.attention"
    flat_k = ops.linear(f"{name}.k", x, f"{at}.self_attn.k_proj")  # [R, N * d]
    flat_v = flat_k if layer.values_from_keys else ops.linear(f"{name}.v", x, f"{at}.self_attn.v_proj")
    k = _rotated(current, layer, f"{name}.k", flat_k, "k_norm", heads)
    v = ops.reshape(f"{name}.v.heads", flat_v, (rows, heads, layer.dim))
    if layer.values_normed:
        v = ops.rms_norm(f"{name}.v.normed", v, None, current.network.epsilon)
    made = []
    for kind, tensor in (("k", k), ("v", v)):
        by_head = heads_first(ops, f"{name}.{kind}.by_head", tensor, rows, heads, (layer.dim,))
        new = ops.convert(f"{kind}_new.{layer.index}", by_head, like=f"{kind}.{layer.index}")
        ops.output(f"{kind}_new.{layer.index}", new)
        made.append(new)
    return made[0], made[1]


def _store(current: _Pass[T], layer: SlmLayer, k_new: T, v_new: T) -> None:
    """Join ring and new rows for this layer and the layers that read its K/V; K is transposed once."""
    ops, name = current.ops, f"layers.{layer.index}.attention"
    ring = (layer.kv_heads, current.network.rings[layer.layer_type], layer.dim)
    keys = ops.concat(f"{name}.keys", [current.input(f"k.{layer.index}", ring), k_new], 1)  # [N, C, d]
    current.keys[layer.index] = ops.transpose(f"{name}.keys_t", keys, (0, 2, 1))
    current.values[layer.index] = ops.concat(f"{name}.values", [current.input(f"v.{layer.index}", ring), v_new], 1)


def _mlp_block(current: _Pass[T], layer: SlmLayer, hidden: T) -> T:
    """hidden + norm(mlp(norm(hidden))); the outer norm where the network has it."""
    ops, at, network = current.ops, f"layers.{layer.index}", current.network
    x = _stream_norm(current, f"{at}.mlp.in", hidden, f"{at}.pre_feedforward_layernorm")
    x = gated_mlp(ops, f"{at}.mlp", x, activation=network.activation)
    return ops.add(f"{at}.fed", hidden, _added(current, layer, "mlp", x, "post_feedforward_layernorm"))


def _per_layer_inputs(current: _Pass[T]) -> T | None:
    """[R, L * P]: (norm(project(embeds) H^-0.5) + lookup) 2^-0.5.

    Both factors are folded: H^-0.5 into the norm's epsilon (a norm does not see a factor: eps H), 2^-0.5 into the
    norm's weight and, on the host, into the lookup.
    """
    ops, network, rows = current.ops, current.network, current.rows
    if not network.per_layer:
        return None
    count = len(network.layers)
    x = ops.linear("per_layer.projected", current.input("embeds", (rows, network.hidden)), "per_layer_model_projection")
    x = ops.reshape("per_layer.by_layer", x, (rows, count, network.per_layer))
    x = ops.rms_norm("per_layer.normed", x, "per_layer_projection_norm", network.epsilon * network.hidden)
    x = ops.reshape("per_layer.joined", x, (rows, count * network.per_layer))
    return ops.add("per_layer.sum", x, current.input("per_layer", (rows, count * network.per_layer)))


def _per_layer_block(current: _Pass[T], layer: SlmLayer, hidden: T, per_layer: T) -> T:
    """hidden + norm(project(gelu(gate(hidden)) * this layer's columns))."""
    ops, at, width = current.ops, f"layers.{layer.index}", current.network.per_layer
    own = ops.slice(f"{at}.ple.own", per_layer, 1, layer.index * width, (layer.index + 1) * width)  # [R, P]
    gate = ops.linear(f"{at}.ple.gate", _summed(current, f"{at}.ple.in", hidden), f"{at}.{GATE}")
    x = gelu(ops, f"{at}.ple.gelu", gate)
    x = ops.linear(f"{at}.ple.out", ops.mul(f"{at}.ple.gated", x, own), f"{at}.per_layer_projection")
    x = ops.rms_norm(f"{at}.ple.normed", x, f"{at}.post_per_layer_input_norm", current.network.epsilon)
    return ops.add(f"{at}.enriched", hidden, _copied(current, f"{at}.ple.normed", x))
