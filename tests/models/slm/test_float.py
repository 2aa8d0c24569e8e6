"""Unquantised checkpoints: the static network is transformers' model, rounding is what it says, mistakes are named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hyco_export.core.tables import PER_LAYER, TABLES_FILE, TOKENS, HostTables, save_tables
from hyco_export.errors import CheckpointError
from hyco_export.models.families import gemma3
from hyco_export.models.slm.float import (
    FloatCheckpoint,
    OriginalEmbeddings,
    Rounding,
    float_stock,
    open_checkpoint,
    original_slm,
)
from hyco_export.models.slm.parity import Scenario, relative_difference, scenarios
from hyco_export.models.slm.surgery import host_tables, network_of, slm_network, slm_weights
from tests.support.float_slm import CONFIGS, gemma3_config, save_float_slm
from tests.support.packed_slm import (
    RINGS,
    ROWS,
    VOCAB,
    WINDOW,
    edit_config,
    edit_tensors,
    random_ids,
    save_packed_slm,
)

KEPT = np.arange(1, VOCAB, 2)
LIMIT = 1e-4  # float32 sums in another order; random weights amplify them
RATIOS = np.linspace(1.0, 0.6, 5)
ROUNDING = Rounding(bits=4, output_bits=8, ratios=RATIOS)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float_slm(tmp_path_factory.mktemp("slm") / "checkpoint", CONFIGS[request.param]())


def saved_gemma3(root: Path) -> Path:
    return save_float_slm(root / "checkpoint")


@pytest.mark.parametrize("case", scenarios(RINGS, ROWS), ids=lambda case: case.name)
def test_static_pass_equals_transformers(folder: Path, case: Scenario) -> None:
    checkpoint = FloatCheckpoint(folder, ROUNDING)
    slm = original_slm(checkpoint, slm_network(checkpoint, RINGS), KEPT)
    embeddings = OriginalEmbeddings(checkpoint)
    assert relative_difference(float_stock(folder), slm, embeddings, KEPT, random_ids(60), ROWS, case, WINDOW) < LIMIT


@pytest.mark.parametrize("field", ["query_pre_attn_scalar", "rope_parameters", "sliding_window"])
def test_a_wrong_part_of_gemma3_is_seen(tmp_path: Path, field: str) -> None:
    folder = saved_gemma3(tmp_path)
    stock = float_stock(folder)
    wrong = {"query_pre_attn_scalar": 8, "rope_parameters": None, "sliding_window": 7}[field]
    edit_config(folder, **{field: wrong})
    checkpoint = FloatCheckpoint(folder, ROUNDING)
    slm = original_slm(checkpoint, slm_network(checkpoint, RINGS), KEPT)
    case, rows = scenarios(RINGS, ROWS)[1], OriginalEmbeddings(checkpoint)
    assert relative_difference(stock, slm, rows, KEPT, random_ids(60), ROWS, case, WINDOW) > 1e-3


def test_linears_are_rounded_to_the_nearest_point_of_their_grid(folder: Path) -> None:
    checkpoint, stock = FloatCheckpoint(folder, ROUNDING), float_stock(folder)
    matrices = slm_weights(checkpoint, KEPT).matrices
    linears = {name: module for name, module in stock.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(matrices) == len(linears) > 10
    for name, module in linears.items():
        matrix = matrices[name.removeprefix("model.")]
        real = module.weight.numpy()[KEPT if name == "lm_head" else slice(None)]
        bits = 8 if name == "lm_head" else 4
        inside = np.clip(
            real, -(2.0 ** (bits - 1)) * matrix.scales[:, None], (2.0 ** (bits - 1) - 1) * matrix.scales[:, None]
        )
        assert matrix.bits == bits
        assert np.abs(matrix.real() - inside).max() <= 0.5001 * matrix.scales.max()
        highest = np.abs(real).max(axis=1) / matrix.scales  # on the last integer, or up to 1 / 0.6 beyond it
        assert ((highest > 2.0 ** (bits - 1) - 1.001) & (highest < (2.0 ** (bits - 1) - 1) / 0.599)).all()


def test_tables_are_rows_of_eight_bits(folder: Path, tmp_path: Path) -> None:
    checkpoint, stock = FloatCheckpoint(folder, ROUNDING), float_stock(folder)
    save_tables(tmp_path / TABLES_FILE, host_tables(checkpoint))
    tables = HostTables(tmp_path / TABLES_FILE)
    ids = np.array([0, 5, VOCAB - 1])
    true = stock.model.embed_tokens(torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(OriginalEmbeddings(checkpoint).tokens(ids), true, rtol=1e-6)
    assert np.abs(tables.tokens(ids) - true).max() <= np.abs(true).max() / 254
    assert tables.layouts[TOKENS].bits == 8
    if PER_LAYER in tables.layouts:
        per_layer = OriginalEmbeddings(checkpoint).per_layer(ids)  # [n, L * P]
        scales = tables.scales(PER_LAYER)
        assert scales.shape == (VOCAB, stock.config.num_hidden_layers)
        assert np.abs(tables.per_layer(ids) - per_layer).max() <= np.abs(per_layer).max() / 254


def test_keys_are_evened_out_for_the_same_scores() -> None:
    text = gemma3_config()
    key = np.array([19.0, 0.0, -0.5, -1.0, 3.0, 0.0, 1.0, -1.0], np.float32)  # less 1; pairs are i and i + 4
    query = np.arange(8, dtype=np.float32)
    names = [f"layers.0.self_attn.{norm}" for norm in ("q_norm", "k_norm")]
    found = gemma3.norms(text, dict(zip(names, (query, key), strict=True)))
    np.testing.assert_allclose(found[names[1]], [1.0, 1.0, 0.25, 0.0, 0.2, 1.0, 1.0, 0.0])
    scores = (1 + query) * (1 + key) * 24**-0.5
    np.testing.assert_allclose(found[names[0]] * found[names[1]], scores, rtol=1e-6)


def test_rows_keep_a_block_of_gguf_as_it_is(tmp_path: Path) -> None:
    folder = save_float_slm(tmp_path / "checkpoint", gemma3_config(hidden_size=64))
    generator = np.random.default_rng(0)
    integers = generator.integers(-127, 128, (VOCAB, 2, 32))
    integers[..., 0] = 127
    scales = np.float16(generator.random((VOCAB, 2, 1)) + 0.1).astype(np.float32)
    table = (integers * scales).astype(np.float32).reshape(VOCAB, 64)
    edit_tensors(folder, model__embed_tokens__weight=torch.from_numpy(table))
    stored = host_tables(FloatCheckpoint(folder, ROUNDING))[TOKENS]
    np.testing.assert_array_equal(stored.packed, integers.reshape(VOCAB, 64))
    np.testing.assert_allclose(stored.scales, scales[..., 0], rtol=1e-6)


def test_a_tied_output_layer_is_the_token_table(tmp_path: Path) -> None:
    checkpoint = FloatCheckpoint(saved_gemma3(tmp_path), ROUNDING)
    whole = checkpoint.vector("model.embed_tokens.weight")
    np.testing.assert_array_equal(checkpoint.float_matrix("lm_head", KEPT), whole[KEPT])


def test_multimodal_names_are_found(tmp_path: Path) -> None:
    folder = saved_gemma3(tmp_path)
    plain = FloatCheckpoint(folder, ROUNDING).vector("model.norm.weight")
    rename(folder, lambda name: name.replace("model.", "model.language_model."))
    np.testing.assert_array_equal(FloatCheckpoint(folder, ROUNDING).vector("model.norm.weight"), plain)


def test_two_spellings_and_tensors_that_no_module_reads_are_refused(tmp_path: Path) -> None:
    folder = saved_gemma3(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, bias: torch.ones(4)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"does not have, first {bias}"):
        FloatCheckpoint(folder, ROUNDING)
    other = {"model.language_model.norm.weight": tensors["model.norm.weight"] + 1}
    save_file({**tensors, **other}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="are the same tensor"):
        FloatCheckpoint(folder, ROUNDING)


def rename(folder: Path, new: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({new(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "tensor", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, tensor: str) -> None:
    folder = saved_gemma3(tmp_path)
    edit_tensors(folder, **{tensor.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=f"has no tensor {tensor}"):
        FloatCheckpoint(folder, ROUNDING)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = saved_gemma3(tmp_path)
    edit_config(folder, intermediate_size=44)
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate_proj\.weight is stored as \[40, 32\], the config asks for \[44, 32\]"
    ):
        FloatCheckpoint(folder, ROUNDING)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    folder = saved_gemma3(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short or damaged"):
        FloatCheckpoint(folder, ROUNDING)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = saved_gemma3(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    with pytest.raises(CheckpointError, match="holds a 'gemma2' model, an SLM must be one of gemma3_text, gemma4_text"):
        FloatCheckpoint(folder, ROUNDING)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, only None"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_bidirectional_attention": True}, r"use_bidirectional_attention is True \(its attention looks ahead\)"),
    ],
)
def test_what_the_static_network_lacks_is_named(fields: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        network_of(gemma3_config(**fields), RINGS, read=no_tensor)


def no_tensor(name: str) -> np.ndarray:
    raise AssertionError(f"{name} is read of a config that is refused")


def test_the_recipe_must_fit_the_checkpoint(tmp_path: Path) -> None:
    packed = save_packed_slm(tmp_path / "packed")
    with pytest.raises(CheckpointError, match="is quantised: its integers are used as they are") as caught:
        open_checkpoint(packed, ROUNDING)
    assert "$.slm.weights" in caught.value.hint
    with pytest.raises(CheckpointError, match="is not quantised") as caught:
        open_checkpoint(saved_gemma3(tmp_path), None)
    assert "$.slm.weights" in caught.value.hint
