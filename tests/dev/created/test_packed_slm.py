"""A created checkpoint is one that transformers' own quantizer loads whole, and ours reads; its weights differ."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma4ForCausalLM

from hyco_export.dev.created import packed_slm as created
from hyco_export.dev.created.packed_slm import levels, write_packed_slm
from hyco_export.models.families.released_configs import e2b_config, mobile_widths, small_config
from hyco_export.models.slm.packed import PackedCheckpoint, stock_model
from hyco_export.models.slm.reference_weights import TrueLinears, true_tables
from hyco_export.models.tensor_files import TensorFiles
from tests.support.builders import small_tokenizer

VOCAB = 512


def write(folder: Path, seed: int = 1, tokenizer: Path | None = None) -> Path:
    folder.mkdir()
    write_packed_slm(folder, small_config(VOCAB), tokenizer, seed, lambda share: None)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("created") / "slm")


def test_transformers_loads_every_tensor(folder: Path) -> None:
    model, report = Gemma4ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert {name.rpartition(".")[2] for name in report["unexpected_keys"]} <= {"k_cache_scale", "v_cache_scale"}
    with torch.no_grad():
        logits = model(torch.arange(20, 52)[None]).logits
    assert 0.3 < logits.std() < 20.0  # neither dead nor saturated at the soft-cap of 30


def test_every_width_is_read_bit_by_bit_beside_activation_and_cache_scales(folder: Path) -> None:
    checkpoint, stock = PackedCheckpoint(folder), stock_model(folder)
    truth, tables = TrueLinears(stock, {}), true_tables(stock)
    assert {checkpoint.modules[name].bits for name in truth} == {2, 4, 8}
    for name in truth:
        matrix = checkpoint.matrix(name).unpacked()
        assert np.array_equal(matrix.integers, truth[name].integers), name
        assert np.array_equal(matrix.scales, truth[name].scales), name
    for name, (packed, scales) in tables.items():
        assert np.array_equal(checkpoint.table(name).packed, packed), name
        assert np.array_equal(checkpoint.table(name).scales, scales), name
    stored = TensorFiles(folder)
    assert stored.get("model.layers.3.self_attn.q_proj.input_activation_scale") > 0
    assert sum(name.endswith("_cache_scale") for name in stored.names) == 10  # K and V of five storing layers


def test_widths_are_those_of_the_mobile_release(folder: Path) -> None:
    modules = PackedCheckpoint(folder).modules
    bits = {name.removeprefix("model."): module.bits for name, module in modules.items()}
    assert bits["lm_head"] == bits["embed_tokens"] == 2
    assert bits["embed_tokens_per_layer"] == bits["layers.4.mlp.up_proj"] == bits["layers.9.self_attn.q_proj"] == 4
    assert bits["layers.5.mlp.up_proj"] == bits["layers.9.mlp.down_proj"] == 2
    assert bits["layers.3.per_layer_input_gate"] == bits["per_layer_model_projection"] == 8


def test_full_size_has_the_release_shapes() -> None:
    config = e2b_config()
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (35, 1536, 6144)
    assert config.layer_types.count("full_attention") == 7
    assert config.kv_sharing_modes.count("reuse") == 20
    rules = mobile_widths(config).module_quant_configs
    assert next(pattern for pattern in rules if "layers" in pattern).startswith(r"layers\.(15|16|")


def test_shards_have_an_index_and_the_same_values(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(created, "SHARD_BYTES", 100_000)
    sharded = write(tmp_path / "sharded")
    assert len(list(sharded.glob("model-*.safetensors"))) == 3
    whole, parts = PackedCheckpoint(folder), PackedCheckpoint(sharded)
    for name in whole.modules:
        assert np.array_equal(whole.integers(name), parts.integers(name)), name
        assert np.array_equal(whole.scales(name), parts.scales(name)), name


def test_seeds_decide_the_bytes_and_no_two_matrices_are_equal(folder: Path, tmp_path: Path) -> None:
    again, other = write(tmp_path / "again"), write(tmp_path / "other", seed=2)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    checkpoint = PackedCheckpoint(folder)
    contents = [checkpoint.integers(name).tobytes() for name in checkpoint.modules]
    assert len(set(contents)) == len(contents)


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path / "source")
    folder = write(tmp_path / "slm", tokenizer=tmp_path / "source")
    copied = {path.name for path in folder.glob("tokenizer*")}
    assert copied == {"tokenizer.json", "tokenizer_config.json"}
    assert (folder / "chat_template.jinja").is_file()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_use_the_whole_grid_around_zero(bits: int) -> None:
    values = levels(bits)
    assert abs(values.mean()) < 0.01 * 2**bits
    assert values.max() == 2 ** (bits - 1) - 1
    assert values.min() in (-(2 ** (bits - 1)), -(2 ** (bits - 1)) + 1)
