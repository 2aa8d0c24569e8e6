"""Gemma 4's decoder layers in fewer and larger operations, for passes of few rows: each operation costs time there.

The layers compute the same as transformers' and use the same parameters: one product for q, k and v, one for the two
halves of the MLP, one normalisation of all heads (Gemma 4 norms q, k and v over the head dimension; v without a weight,
so that with `attention_k_eq_v` V is K before its weight). Results differ from transformers' by float rounding. The
caller provides attention over its K/V cache and masks.

Legend: R rows, H query heads, N K/V heads, d head dimension, D hidden, P width of a per-layer input.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from hyco_export.models.families.gemma4 import Backbone, DecoderLayer

FIXED_ROTARY = ("default", "proportional", "linear")  # transformers' rotary types that do not depend on the context
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [R, 1, d] each


class Attention(Protocol):
    """Stores the K/V of a pass's rows and computes their attention."""

    def store(self, layer: int, layer_type: str, keys: torch.Tensor, values: torch.Tensor, shared: bool) -> None:
        """Take K/V [R, N, d] of a layer that computes them; `shared`: later layers of the type read them, too."""
        ...

    def attend(self, layer_type: str, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of query [R, H, d] over the K/V that were last stored for the type: [R, H * d]."""
        ...


def fits(model: nn.Module) -> bool:
    """Can this model be fused: a backbone whose products are plain matrices (not sharded or quantised, no bias)?"""
    if type(model) is not Backbone:
        return False
    parts: list[nn.Module] = [part for layer in _layers(model) for part in (layer.self_attn, layer.mlp)]
    products = [module for part in parts for module in part.children() if isinstance(module, nn.Linear)]
    return all(type(module) is nn.Linear and module.bias is None for module in products) and all(
        type(parameter) is nn.Parameter for parameter in model.parameters()
    )


def _layers(model: Backbone) -> list[DecoderLayer]:
    return [cast(DecoderLayer, layer) for layer in model.layers]


class FusedStack:
    """The layers and the final norm of one backbone.

    Matrices that are used in one product become one tensor, of which the model's own parameters become views: nothing
    is held twice.

    Args:
        compiled: operations between attentions go through torch's compiler at the first pass. That is faster on a GPU,
            where launching small operations takes the time; on a CPU it needs a C++ compiler.
    """

    def __init__(self, model: Backbone, compiled: bool = False) -> None:
        self._model = model
        types = model.config.layer_types or []
        self._layers = [_Layer(layer, kind, compiled) for layer, kind in zip(_layers(model), types, strict=True)]
        self._norm = _norm_of(model.norm.weight, model.norm.eps)
        self._types = sorted(model.unique_layer_types)
        self._dtype = model.norm.weight.dtype
        self._frequencies = _frequencies(model.rotary_emb, self._types)

    def rotations(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """Rotations by layer type, for positions [R]."""
        result = {}
        where = positions[:, None, None]
        for layer_type in self._types:
            if layer_type in self._frequencies:
                angles = where * self._frequencies[layer_type]  # [R, 1, d]
                result[layer_type] = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
            else:
                result[layer_type] = self._scaled_rotation(positions, layer_type)
        return result

    def _scaled_rotation(self, positions: torch.Tensor, layer_type: str) -> Rotation:
        """transformers' own, for frequencies that depend on the context's length, or have a factor."""
        cos, sin = self._model.rotary_emb(self._model.norm.weight, positions[None], layer_type)  # [1, R, d]
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0, :, None], signed[:, None]

    def per_layer_inputs(self, ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Per-layer inputs [R, layers, P] of ids [R] with embeddings [R, D]; None: the model has none."""
        if not self._model.hidden_size_per_layer_input:
            return None
        own = self._model.get_per_layer_inputs(ids[None], embedded[None])
        return self._model.project_per_layer_inputs(embedded[None], own)[0]

    def run(
        self,
        hidden: torch.Tensor,
        rotations: Mapping[str, Rotation],
        attention: Attention,
        per_layer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers on hidden [R, D] -> hidden states after the final norm, and before it."""
        for index, layer in enumerate(self._layers):
            own = per_layer[:, index] if per_layer is not None else None
            hidden = layer.run(index, hidden, rotations[layer.layer_type], attention, own)
        return self._norm(hidden), hidden


def _frequencies(rotary: Any, layer_types: list[str]) -> dict[str, torch.Tensor]:
    """Float32 [d] of the layer types with fixed ones; the first half is negative, for the signs of the sines."""
    result = {}
    for layer_type in layer_types:
        if rotary.rope_type[layer_type] in FIXED_ROTARY and getattr(rotary, f"{layer_type}_attention_scaling") == 1.0:
            half = getattr(rotary, f"{layer_type}_inv_freq").float()
            result[layer_type] = torch.cat((-half, half))
    return result


class _Norm(NamedTuple):
    """RMS norm: x * w * sqrt(D) / hypot(|x|, sqrt(D * eps)), in float32 as transformers does."""

    scale: torch.Tensor  # w * sqrt(D)
    floor: torch.Tensor  # sqrt(D * eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            real = x.float()
            return (real * self.scale / self.length(real)).type_as(x)
        return (x * self.scale).div_(self.length(x))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + norm(x)."""
        if x.dtype != torch.float32:
            return residual + self(x)
        return torch.addcdiv(residual, x * self.scale, self.length(x))

    def unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """norm(x) for weights of 1."""
        real = x.float()
        return (real * math.sqrt(x.shape[-1]) / self.length(real)).type_as(x)

    def length(self, real: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., 1]."""
        return torch.hypot(torch.linalg.vector_norm(real, 2, -1, True), self.floor)


def _norm_of(weight: torch.Tensor, eps: float) -> _Norm:
    """The norm with these weights [..., D]."""
    root = math.sqrt(weight.shape[-1])
    return _Norm(weight.float() * root, torch.tensor(root * math.sqrt(eps), device=weight.device))


class _Layer:
    """One decoder layer. Its tensors are plain attributes: a module looks its own up in three dictionaries."""

    def __init__(self, layer: DecoderLayer, layer_type: str, compiled: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_type = layer_type
        self._project: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        self._feed: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        self._project, self._feed = _compiled() if compiled else (_project, _feed)
        self._scaling = attention.scaling
        self._shares_kv = attention.store_full_length_kv
        inputs = [attention.q_proj]
        scales = [attention.q_norm.weight.expand(attention.config.num_attention_heads, -1)]
        self._kv_heads = 0
        self._values_are_keys = attention.v_proj is None if not attention.is_kv_shared_layer else False
        if not attention.is_kv_shared_layer:
            self._kv_heads = attention.k_proj.weight.shape[0] // attention.head_dim
            inputs += [attention.k_proj] if attention.v_proj is None else [attention.k_proj, attention.v_proj]
            scales.append(attention.k_norm.weight.expand(self._kv_heads, -1))
            if attention.v_proj is not None:
                scales.append(torch.ones_like(scales[-1]))  # v's norm has no scale
        self._in = _side_by_side(inputs)
        self._out = attention.o_proj.weight
        self._heads = _norm_of(torch.cat(scales), attention.q_norm.eps)
        self._gate_up = _side_by_side([mlp.gate_proj, mlp.up_proj])
        self._down = mlp.down_proj.weight
        self._act = mlp.act_fn.forward  # without the hooks of a module's call
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            _norm_of(norm.weight, norm.eps) for norm in norms
        )
        self._experts = layer if layer.enable_moe_block else None
        self._per_layer = layer if layer.hidden_size_per_layer_input else None
        self._scalar = None if float(layer.layer_scalar) == 1.0 else layer.layer_scalar

    def run(
        self, index: int, hidden: torch.Tensor, rotation: Rotation, attention: Attention, own: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden [R, D] -> [R, D]."""
        query, keys, values = self._project(
            hidden, self._before_attention, self._in, self._heads, self._kv_heads, self._values_are_keys, rotation
        )
        if self._kv_heads:
            attention.store(index, self.layer_type, keys, values, self._shares_kv)
        seen = attention.attend(self.layer_type, query, self._scaling)
        norms = self._after_attention, self._before_mlp
        hidden, fed = self._feed(hidden, seen, self._out, norms, self._gate_up, self._act, self._down)
        if self._experts is not None:
            fed = _with_experts(self._experts, fed, hidden)
        hidden = self._after_mlp.added_to(hidden, fed)
        if self._per_layer is not None:
            layer: Any = self._per_layer
            gated = layer.act_fn(layer.per_layer_input_gate(hidden)) * own
            hidden = hidden + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
        return hidden if self._scalar is None else hidden * self._scalar


def _project(
    hidden: torch.Tensor,
    before: _Norm,
    matrix: torch.Tensor,
    norm: _Norm,
    kv_heads: int,
    values_are_keys: bool,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [R, D] -> query [R, H, d], keys and values [R, N, d]; all normed, query and keys rotated.

    `norm` has a row of scales for every head of the product; where V is K before its scale, V has no heads in it. In a
    layer without K/V of its own (N = 0) the returned keys and values are not to be used.
    """
    heads = functional.linear(before(hidden), matrix).view(len(hidden), -1, norm.scale.shape[1])  # q, k (, v)
    if not kv_heads:
        return _rotated(norm(heads), rotation), heads, heads
    every = heads.shape[1]
    if values_are_keys:
        values = norm.unscaled(heads.narrow(1, every - kv_heads, kv_heads))
        turned = _rotated(norm(heads), rotation)
    else:
        normed = norm(heads)
        values = normed.narrow(1, every - kv_heads, kv_heads)
        turned = _rotated(normed.narrow(1, 0, every - kv_heads), rotation)
    query_heads = turned.shape[1] - kv_heads
    return turned.narrow(1, 0, query_heads), turned.narrow(1, query_heads, kv_heads), values


def _rotated(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """heads [R, ., d] rotated by their rows' positions."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _feed(
    hidden: torch.Tensor,
    seen: torch.Tensor,
    out: torch.Tensor,
    norms: tuple[_Norm, _Norm],
    gate_up: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    down: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [R, D] and attention [R, H * d] -> hidden after the attention, and the MLP's output, [R, D] each."""
    after, before = norms
    hidden = after.added_to(hidden, functional.linear(seen, out))
    both = functional.linear(before(hidden), gate_up)
    width = down.shape[1]
    gated = act(both.narrow(-1, 0, width)).mul_(both.narrow(-1, width, width))
    return hidden, functional.linear(gated, down)


@cache
def _compiled() -> tuple[Any, Any]:
    """`_project` and `_feed` by torch's compiler: a few kernels each, for any number of rows."""
    return tuple(torch.compile(function, dynamic=True, fullgraph=True) for function in (_project, _feed))  # type: ignore[return-value]


def _with_experts(layer: Any, dense: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The sum of the MLP's and the experts' outputs, each through its norm."""
    _, weights, chosen = layer.router(residual)
    experts = layer.experts(layer.pre_feedforward_layernorm_2(residual), chosen, weights)
    return layer.post_feedforward_layernorm_1(dense) + layer.post_feedforward_layernorm_2(experts)


def _side_by_side(modules: list[nn.Linear]) -> torch.Tensor:
    """One matrix of the modules' weights, which become views of it; where they are already, the same matrix again."""
    weights = [module.weight.detach() for module in modules]
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    place = weights[0].data_ptr()
    in_place = True
    for weight in weights:
        in_place = in_place and weight.data_ptr() == place and weight.is_contiguous()
        place += weight.nbytes
    if in_place and weights[0].untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr():
        return weights[0].as_strided((rows, columns), (columns, 1))
    whole = torch.cat(weights)
    for module, part in zip(modules, whole.split([len(weight) for weight in weights]), strict=True):
        module.weight = nn.Parameter(part, requires_grad=False)
    return whole
