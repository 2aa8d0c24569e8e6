"""Packing: what transformers unpacks is what training computed."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, _unpack_int2, _unpack_int4

from hyco_export.dev.tiny.configs import slm_config
from hyco_export.dev.tiny.packing import attach_fake_quant, integer_range, module_width, pack, save_packed
from hyco_export.errors import CheckpointError


@pytest.mark.parametrize(("bits", "unpack"), [(2, _unpack_int2), (4, _unpack_int4)])
def test_transformers_unpacks_what_was_packed(bits, unpack):
    low, high = integer_range(bits)
    integers = torch.randint(low, high + 1, (5, 24), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack(integers, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, 24 * bits // 8)
    assert torch.equal(unpack(packed, 24), integers)


def test_eight_bits_are_stored_unchanged():
    integers = torch.arange(-128, 128, dtype=torch.int8)[None]
    assert torch.equal(pack(integers, 8), integers)


def test_odd_widths_are_refused():
    with pytest.raises(CheckpointError, match="6 columns cannot be packed 4 to a byte"):
        pack(torch.zeros(2, 6, dtype=torch.int8), 2)


@pytest.fixture(scope="module")
def trained_slm():
    torch.manual_seed(0)
    slm = Gemma4ForCausalLM(slm_config()).eval()
    attach_fake_quant(slm)
    return slm


def test_packed_checkpoint_computes_what_was_trained(trained_slm, tmp_path):
    save_packed(
        trained_slm, tmp_path, cache_scales={"model.layers.0.self_attn.k_cache_scale": 0.1}, activation_scales={}
    )
    loaded = Gemma4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 2048, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained_slm(ids).logits)


def test_widths_layout_and_scales(trained_slm, tmp_path):
    save_packed(
        trained_slm,
        tmp_path,
        cache_scales={"model.layers.0.self_attn.k_cache_scale": 0.1},
        activation_scales={"lm_head": (0.5, 0.25)},
    )
    loaded = Gemma4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    quantised = {n: m for n, m in loaded.named_modules() if isinstance(m, QuantizedLinear | QuantizedEmbedding)}
    assert {module.num_bits for module in quantised.values()} == {2, 4, 8}
    assert all(module.num_bits == module_width(name) for name, module in quantised.items())
    assert not any(type(module) in (torch.nn.Linear, torch.nn.Embedding) for module in loaded.modules())
    assert loaded.lm_head.input_activation_scale.item() == 0.5
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.k_cache_scale"].item() == pytest.approx(0.1)
    linears = [name for name, module in quantised.items() if isinstance(module, QuantizedLinear)]
    assert linears
    for name in linears:
        assert tensors[f"{name}.weight_scale"].shape == (tensors[f"{name}.weight"].shape[0], 1)
        assert tensors[f"{name}.weight_scale"].min() > 0
        assert f"{name}.output_activation_scale" in tensors
