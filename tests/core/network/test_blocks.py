"""The shared blocks are what transformers' modules compute."""

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb, repeat_kv

from hyco_export.core.network import blocks
from hyco_export.core.network.weights import Weights
from hyco_export.models.torch_ops import TorchOps, TorchWeights

NOTHING = TorchWeights(Weights({}, {}, {}))


def ops(**feeds: torch.Tensor) -> TorchOps:
    return TorchOps(NOTHING, feeds)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gelu_is_the_tanh_form() -> None:
    x = torch.linspace(-8, 8, 101)[None]
    assert torch.allclose(blocks.gelu(ops(), "g", x), ACT2FN["gelu_pytorch_tanh"](x), atol=1e-6)


def test_silu_is_x_times_its_sigmoid() -> None:
    x = torch.linspace(-30, 30, 101)[None]
    assert torch.allclose(blocks.silu(ops(), "s", x), ACT2FN["silu"](x), atol=1e-6)


def test_rotate_takes_the_sign_from_the_table() -> None:
    x, angles = normal(3, 2, 8), normal(3, 4, seed=1)
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))
    folded = torch.cat([-sin[:, :4], sin[:, 4:]], -1)
    wanted = apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)
    assert torch.allclose(blocks.rotate(ops(), "r", x, cos[:, None], folded[:, None], (3, 2, 8)), wanted, atol=1e-6)


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(5, 4, 1), (5, 4, 2), (1, 4, 2), (5, 2, 2), (1, 1, 1)])
def test_grouped_attention_repeats_no_keys(rows: int, heads: int, kv_heads: int) -> None:
    dim, width = 8, 11
    query, keys, values = (
        normal(rows, heads, dim),
        normal(kv_heads, width, dim, seed=1),
        normal(kv_heads, width, dim, seed=2),
    )
    hidden = torch.from_numpy(np.random.default_rng(0).random((rows, width)) < 0.4)
    hidden[:, 0] = False
    mask = torch.where(hidden, -100.0, 0.0)
    shape = blocks.AttentionShape(rows, heads, kv_heads, dim)
    found = blocks.attend(ops(), "a", query, keys.permute(0, 2, 1), values, mask, shape, width)

    many_keys, many_values = (repeat_kv(part[None], heads // kv_heads)[0] for part in (keys, values))  # [A, C, d]
    scores = query.permute(1, 0, 2) @ many_keys.transpose(1, 2)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    wanted = (shares @ many_values).permute(1, 0, 2).reshape(rows, heads * dim)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_beyond_the_cut_nothing_changes() -> None:
    ranges = {"m.gelu.square": (0.0, 2500.0), "m.gelu.argument": (-1.0, 4500.0), "m.out": (-9.0, 9.0)}
    assert blocks.cut_where_flat(ranges) == {
        "m.gelu.square": (0.0, 18.0),
        "m.gelu.argument": (-1.0, 6.0),
        "m.out": (-9.0, 9.0),
    }
    half_step = 1.0 / 65535.0
    assert 1.0 - np.tanh(blocks.FLAT) < half_step
    knee = np.sqrt(blocks.GELU_FLAT_SQUARE)
    assert knee * (blocks.GELU_LINEAR + blocks.GELU_CUBIC * blocks.GELU_FLAT_SQUARE) > blocks.FLAT


def test_soft_cap() -> None:
    x = torch.linspace(-90, 90, 7)[None]
    assert torch.allclose(blocks.soft_cap(ops(), "c", x, 30.0), 30.0 * torch.tanh(x / 30.0))


def test_gated_mlp_is_transformers_mlp() -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP

    from tests.support.packed_slm import slm_config

    torch.manual_seed(0)
    mlp = Gemma4TextMLP(slm_config(), 0)
    matrices = {
        f"mlp.{name}": part.weight.detach().numpy() for name, part in mlp.named_children() if hasattr(part, "weight")
    }
    assert set(matrices) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    x = normal(3, 32)
    found = blocks.gated_mlp(TorchOps(TorchWeights(Weights(matrices, {}, {})), {}), "mlp", x)
    assert torch.allclose(found, mlp(x), atol=1e-6)
