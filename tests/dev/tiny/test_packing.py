"""Training sees LSQ's gradients, and what transformers unpacks is what training computed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4ForCausalLM
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, _unpack_int2, _unpack_int4

from hyco_export.core.files import CHECKPOINTS
from hyco_export.dev.tiny.configs import slm_config
from hyco_export.dev.tiny.packing import FakeQuant, attach_fake_quant, module_width, packing_config, save_packed


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("bits", "lowest", "highest"), [(2, -2, 1), (4, -8, 7), (8, -128, 127)])
def test_values_and_gradients_are_those_of_the_lsq_paper(bits: int, lowest: int, highest: int) -> None:
    weight, given = normal(6, 40).requires_grad_(), normal(6, 40).flip(0)
    quantiser = FakeQuant(weight.detach(), bits).double()
    with torch.no_grad():
        quantiser.log_scale -= 0.3  # some weights lie beyond the ends of the grid
    scale = quantiser.scale.detach()
    steps = weight.detach() / scale
    below, above = steps < lowest, steps > highest
    between = ~(below | above)
    assert below.any() and above.any() and between.any()
    # Esser et al. 2020, equations 1 to 3 and 5
    integers = torch.where(below, float(lowest), torch.where(above, float(highest), steps.round()))
    by_scale = torch.where(between, integers - steps, integers)

    result = quantiser(weight)
    to_weight, to_log_scale = torch.autograd.grad((result * given).sum(), (weight, quantiser.log_scale))
    torch.testing.assert_close(result, integers * scale)
    torch.testing.assert_close(to_weight, given * between)
    torch.testing.assert_close(to_log_scale, (given * by_scale).sum(1, keepdim=True) * scale)  # d scale / d log scale


def test_a_row_of_zeros_has_a_scale_and_stays_zero() -> None:
    quantiser = FakeQuant(torch.zeros(2, 8), 4)
    assert quantiser.log_scale.isfinite().all()
    assert not quantiser(torch.zeros(2, 8)).any()


@pytest.mark.parametrize(("bits", "unpack"), [(2, _unpack_int2), (4, _unpack_int4)])
def test_transformers_unpacks_what_was_packed(bits, unpack):
    weight = normal(5, 24).float()
    quantiser = FakeQuant(weight, bits)
    packed = quantiser.packed(weight)
    assert packed.integers.dtype == "uint8"
    assert packed.integers.shape == (5, 24 * bits // 8)
    unpacked = unpack(torch.from_numpy(packed.integers), 24)
    torch.testing.assert_close(unpacked * torch.from_numpy(packed.scales)[:, None], quantiser(weight))


def test_the_widths_are_those_of_the_committed_checkpoint() -> None:
    config = json.loads((CHECKPOINTS / "slm" / "config.json").read_text())
    assert json.loads(json.dumps(packing_config().to_dict())) == config["quantization_config"]


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
