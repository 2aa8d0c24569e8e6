"""Packed checkpoints are read as transformers reads them, and every fault in one is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hyco_export.core.tables import real_rows
from hyco_export.errors import CheckpointError
from hyco_export.models.slm.packed import PackedCheckpoint, stock_model
from hyco_export.models.slm.reference_weights import TrueLinears
from tests.support.packed_slm import VOCAB, edit_config, edit_tensors, random_ids, save_packed_slm, slm_config

GATE = "model.layers.2.mlp.gate_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_packed_slm(tmp_path / "slm")


def test_every_linear_has_transformers_integers_and_scales(folder: Path) -> None:
    checkpoint, truth = PackedCheckpoint(folder), TrueLinears(stock_model(folder), {})
    linears = [name for name, module in checkpoint.modules.items() if module.factor is None]
    assert set(linears) == set(truth)
    assert {checkpoint.modules[name].bits for name in linears} == {2, 4, 8}
    for name in linears:
        matrix = checkpoint.matrix(name).unpacked()
        assert matrix.integers.dtype == np.int8
        assert np.array_equal(matrix.integers, truth[name].integers), name
        assert np.array_equal(matrix.scales, truth[name].scales), name


def test_tables_give_transformers_rows(folder: Path) -> None:
    checkpoint, model = PackedCheckpoint(folder), stock_model(folder).model
    ids = torch.arange(VOCAB)
    for name, module in (
        ("model.embed_tokens", model.embed_tokens),
        ("model.embed_tokens_per_layer", model.embed_tokens_per_layer),
    ):
        table = checkpoint.table(name)
        assert np.array_equal(real_rows(table.packed, table.scales, table.layout), module(ids).detach().numpy())


def test_activation_rounding_is_off_in_the_stock_model(folder: Path) -> None:
    ids = torch.tensor([random_ids(5)])
    with torch.no_grad():
        before = stock_model(folder)(ids).logits
        edit_tensors(folder, **{f"{GATE}.input_activation_scale".replace(".", "__"): torch.tensor(0.0)})
        assert torch.equal(stock_model(folder)(ids).logits, before)


def test_quant_method_and_list_of_exceptions_may_be_missing(folder: Path) -> None:
    settings = slm_settings(folder)
    del settings["quant_method"], settings["modules_to_not_convert"]
    edit_config(folder, quantization_config=settings)
    assert "lm_head" in PackedCheckpoint(folder).modules
    assert stock_model(folder).lm_head.num_bits == 4


def test_names_of_a_multimodal_checkpoint_are_found(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in load_file(path).items()}
    expected = PackedCheckpoint(folder).integers(GATE)
    save_file(tensors, path)
    assert np.array_equal(PackedCheckpoint(folder).integers(GATE), expected)


def test_shards_are_read_through_their_index(folder: Path) -> None:
    expected = PackedCheckpoint(folder).integers(GATE)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[:40], "model-2.safetensors": names[40:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert np.array_equal(PackedCheckpoint(folder).integers(GATE), expected)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors does not exist"):
        PackedCheckpoint(folder)


def test_two_spellings_of_one_tensor_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    other = f"{GATE}.weight".replace("model.", "model.language_model.", 1)
    save_file({**tensors, other: tensors[f"{GATE}.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match=f"{other} and {GATE}.weight are the same tensor"):
        PackedCheckpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        f"{GATE}.bias",
        f"{GATE}.lora_A.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight",
        "model.layers.9.layer_scalar",
        "lm_head.bias",
    ],
)
def test_tensors_that_no_module_reads_are_named(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(4)}, path)
    with pytest.raises(CheckpointError, match=f"holds 1 tensors that the model of its config does not have, .*{name}"):
        PackedCheckpoint(folder)


def test_tensors_that_transformers_passes_over_may_be_there(folder: Path) -> None:
    path = folder / "model.safetensors"
    attention = "model.layers.4.self_attn"  # reads another layer's keys and values
    extra = (f"{attention}.k_proj.weight", f"{attention}.k_cache_scale", f"{attention}.rotary_emb.inv_freq")
    save_file({**load_file(path), **{name: torch.ones(4) for name in extra}}, path)
    PackedCheckpoint(folder)


def slm_settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    "tensor", [f"{GATE}.weight", f"{GATE}.weight_scale", "model.layers.1.layer_scalar", "model.norm.weight"]
)
def test_a_missing_tensor_is_named(folder: Path, tensor: str) -> None:
    edit_tensors(folder, **{tensor.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=f"has no tensor {tensor}"):
        PackedCheckpoint(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short or damaged"):
        PackedCheckpoint(folder)


def test_wrong_bits_are_named_with_the_shapes(folder: Path) -> None:
    settings = slm_settings(folder)
    settings["module_quant_configs"][r"layers\.(2|3|4)\.mlp\."] = {"num_bits": 4}
    edit_config(folder, quantization_config=settings)
    wanted = rf"{GATE}\.weight is stored as \[80, 8\]; 4 bits of \[80, 32\] are \[80, 16\]"
    with pytest.raises(CheckpointError, match=wanted):
        PackedCheckpoint(folder)


@pytest.mark.parametrize("setting", ["module_quant_configs", "modules_to_not_convert"])
def test_a_pattern_that_is_none_is_named(folder: Path, setting: str) -> None:
    given = {"layers.(": {"num_bits": 8}} if setting == "module_quant_configs" else ["layers.("]
    edit_config(folder, quantization_config={**slm_settings(folder), setting: given})
    with pytest.raises(CheckpointError, match=r"'layers\.\(' is not a regular expression"):
        PackedCheckpoint(folder)


def test_a_packed_model_that_is_not_read_unquantised_either_gets_true_advice(folder: Path) -> None:
    edit_config(folder, model_type="llama", quantization_config=slm_settings(folder))
    with pytest.raises(CheckpointError, match="is a packed 'llama' model") as caught:
        PackedCheckpoint(folder)
    assert caught.value.hint == "correct $.models.slm: an SLM must be one of gemma3_text, gemma4_text"


def test_an_impossible_width_is_named(folder: Path) -> None:
    edit_config(folder, quantization_config={**slm_settings(folder), "num_bits": 3})
    with pytest.raises(CheckpointError, match=r"num_bits of \* is 3, not one of \[2, 4, 8\]"):
        PackedCheckpoint(folder)


@pytest.mark.parametrize("wrong", [0.0, -0.5, float("nan")])
def test_a_scale_that_is_not_positive_is_named(folder: Path, wrong: float) -> None:
    scales = torch.full((80, 1), 0.01)
    scales[7] = wrong
    edit_tensors(folder, **{f"{GATE}.weight_scale".replace(".", "__"): scales})
    with pytest.raises(CheckpointError, match=rf"{GATE}\.weight_scale: scale of row 7 is \[{wrong}\], 1 rows"):
        PackedCheckpoint(folder)


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        (f"{GATE}.weight", torch.zeros(80, 8), rf"{GATE}\.weight is stored as F32; 2 bits are U8"),
        (f"{GATE}.weight_scale", torch.ones(80, 1, dtype=torch.int8), r"weight_scale is stored as I8, expected one of"),
        (f"{GATE}.weight_scale", torch.ones(80), r"weight_scale is \[80\], expected \[80, 1\]"),
        ("model.norm.weight", torch.ones(31), r"model\.norm\.weight is \[31\], the model's config asks for \[32\]"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int32), r"model\.norm\.weight is stored as I32"),
    ],
)
def test_another_type_or_shape_is_named(folder: Path, tensor: str, value: torch.Tensor, words: str) -> None:
    edit_tensors(folder, **{tensor.replace(".", "__"): value})
    with pytest.raises(CheckpointError, match=words):
        PackedCheckpoint(folder)


@pytest.mark.parametrize(("settings", "words"), [(None, "is not quantised"), ({"quant_method": "awq"}, "with 'awq'")])
def test_other_formats_are_refused(folder: Path, settings: dict[str, str] | None, words: str) -> None:
    edit_config(folder, quantization_config=settings)
    with pytest.raises(CheckpointError, match=words):
        PackedCheckpoint(folder)


def test_odd_widths_are_read(tmp_path: Path) -> None:
    folder = save_packed_slm(tmp_path / "odd", slm_config(intermediate_size=37))
    checkpoint, truth = PackedCheckpoint(folder), TrueLinears(stock_model(folder), {})
    for name, columns in (("model.layers.0.mlp.down_proj", 37), ("model.layers.3.mlp.down_proj", 74)):
        assert checkpoint.integers(name).shape[1] == columns  # 4 and 2 bits: the last byte is partly used
        assert np.array_equal(checkpoint.integers(name), truth[name].integers)
