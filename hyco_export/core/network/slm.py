"""The SLM as a static network: one pass of R rows on top of its K/V rings (HyCo, §3.2 and Appendix A).

Follows transformers' `Gemma4ForCausalLM` with per-layer embeddings, shared K/V, double-wide MLPs and k = v layers, and
`Gemma3ForCausalLM`, whose values have no norm; embeddings and rotary tables come from the host.

Legend: R rows, W ring slots of a layer type, C = W + R, H hidden, A query heads, N kv heads, d head dim, L layers,
P per-layer width, V kept tokens. Names of inputs and outputs: `core.device_spec`.
"""

from typing import Generic

import msgspec

from hyco_export.core.network.blocks import (
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


class SlmNetwork(msgspec.Struct, frozen=True):
    """Everything of the SLM's shape that does not depend on the number of rows."""

    hidden: int
    per_layer: int  # P, 0 = no per-layer embeddings
    epsilon: float
    soft_cap: float | None
    rings: dict[str, int]  # W by layer type
    spans: dict[str, int | None]  # newest positions a row may see, by layer type; None = the whole ring
    inv_freq: dict[str, tuple[float, ...]]  # rotary frequencies [d/2] by layer type
    layers: tuple[SlmLayer, ...]

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
    hidden = current.input("embeds", (rows, network.hidden))
    per_layer = _per_layer_inputs(current)
    for layer in network.layers:
        hidden = _layer(current, layer, hidden, per_layer)
    final = ops.rms_norm("final", hidden, "norm", network.epsilon)
    if network.soft_cap is None:
        logits = ops.linear("logits", final, "lm_head")
    else:
        logits = soft_cap(ops, "logits", ops.linear("logits.raw", final, "lm_head"), network.soft_cap)
    ops.output("logits", logits)


def build_prefill(ops: Ops[T], network: SlmNetwork, rows: int) -> None:
    """A prefill pass: new K/V rows only. It ends at the last layer that stores K/V; later layers only read it."""
    current = _Pass(ops, network, rows)
    hidden = current.input("embeds", (rows, network.hidden))
    last = network.storing[-1].index
    per_layer = _per_layer_inputs(current) if last else None
    for layer in network.layers[:last]:
        hidden = _layer(current, layer, hidden, per_layer)
    _new_rows(current, network.layers[last], _attention_input(current, network.layers[last], hidden))


def layer_results(network: SlmNetwork) -> tuple[str, ...]:
    """Names of the hidden states [R, H] after each layer of a tree pass, then of the final norm's."""
    end = "enriched" if network.per_layer else "fed"
    results = [f"layers.{layer.index}.{end if layer.scalar == 1.0 else 'scaled'}" for layer in network.layers]
    return (*results, "final")


def _layer(current: _Pass[T], layer: SlmLayer, hidden: T, per_layer: T | None) -> T:
    """hidden [R, H] -> [R, H]; transformers' `Gemma4TextDecoderLayer`."""
    hidden = _attention_block(current, layer, hidden)
    hidden = _mlp_block(current, layer, hidden)
    if per_layer is not None:
        hidden = _per_layer_block(current, layer, hidden, per_layer)
    if layer.scalar != 1.0:
        hidden = current.ops.scale(f"layers.{layer.index}.scaled", hidden, layer.scalar)
    return hidden


def _attention_input(current: _Pass[T], layer: SlmLayer, hidden: T) -> T:
    at = f"layers.{layer.index}"
    return current.ops.rms_norm(f"{at}.attention.in", hidden, f"{at}.input_layernorm", current.network.epsilon)


def _attention_block(current: _Pass[T], layer: SlmLayer, hidden: T) -> T:
    """hidden + norm(attention(norm(hidden)))."""
    ops, at, name = current.ops, f"layers.{layer.index}", f"layers.{layer.index}.attention"
    x = _attention_input(current, layer, hidden)
    if layer.stores:
        _store(current, layer, *_new_rows(current, layer, x))
    query = ops.linear(f"{name}.q", x, f"{at}.self_attn.q_proj")
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
    normed = ops.rms_norm(f"{name}.normed", mixed, f"{at}.post_attention_layernorm", current.network.epsilon)
    return ops.add(f"{at}.attended", hidden, normed)


def _rotated(current: _Pass[T], layer: SlmLayer, name: str, flat: T, norm: str, heads: int) -> T:
    """flat [R, heads * d] -> normed and rotated [R, heads, d]."""
    ops, shape = current.ops, (current.rows, heads, layer.dim)
    x = ops.reshape(f"{name}.heads", flat, shape)
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
    """hidden + norm(mlp(norm(hidden)))."""
    ops, at, epsilon = current.ops, f"layers.{layer.index}", current.network.epsilon
    x = ops.rms_norm(f"{at}.mlp.in", hidden, f"{at}.pre_feedforward_layernorm", epsilon)
    x = gated_mlp(ops, f"{at}.mlp", x)
    x = ops.rms_norm(f"{at}.mlp.normed", x, f"{at}.post_feedforward_layernorm", epsilon)
    return ops.add(f"{at}.fed", hidden, x)


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
    x = gelu(ops, f"{at}.ple.gelu", ops.linear(f"{at}.ple.gate", hidden, f"{at}.per_layer_input_gate"))
    x = ops.linear(f"{at}.ple.out", ops.mul(f"{at}.ple.gated", x, own), f"{at}.per_layer_projection")
    x = ops.rms_norm(f"{at}.ple.normed", x, f"{at}.post_per_layer_input_norm", current.network.epsilon)
    return ops.add(f"{at}.enriched", hidden, x)
