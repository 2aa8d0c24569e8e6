"""The 8-bit table against transformers' own embedding layer."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextScaledWordEmbedding

from hyco_export.errors import CheckpointError
from hyco_export.models import embedding_table
from hyco_export.models.embedding_table import find_embedding, quantize_rows, quantized_embedding

VOCAB, HIDDEN = 50, 12
NAME = "model.embed_tokens.weight"


@pytest.fixture
def weight():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_verifiers_embedding_layer(tmp_path, monkeypatch, weight, dtype):
    monkeypatch.setattr(embedding_table, "CHUNK_ROWS", 7)  # several chunks, some without a kept token
    save_file({NAME: weight, "model.embed_tokens_per_layer.weight": weight.clone()}, tmp_path / "model.safetensors")
    layer = Gemma4TextScaledWordEmbedding(VOCAB, HIDDEN, None, embed_scale=HIDDEN**0.5).to(getattr(torch, dtype))
    layer.weight.data.copy_(weight)
    ids = np.array([0, 3, 6, 7, 30, 49], dtype=np.int32)

    source = find_embedding(tmp_path)
    table = quantized_embedding(source, ids, dtype)

    assert (source.tensor, source.vocab_size, source.hidden) == (NAME, VOCAB, HIDDEN)
    expected = layer(torch.from_numpy(ids)).detach().float().numpy()
    error = np.abs(table.integers * table.scale[:, None] - expected)
    assert np.all(error <= table.scale[:, None] * 0.5001)
    assert np.array_equal(table.scale, np.abs(expected).max(axis=1) / np.float32(127))


def test_every_row_uses_the_whole_grid_and_a_zero_row_stays_zero():
    table = quantize_rows(np.array([[1.0, -2.0], [0.0, 0.0], [1e-4, 5e-5]], dtype=np.float32))
    assert table.integers.tolist() == [[64, -127], [0, 0], [127, 64]]
    assert np.all(table.scale > 0)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path, weight):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({f"model.language_{NAME}": weight}, tmp_path / "model-00002-of-00002.safetensors")
    index = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        f"model.language_{NAME}": "model-00002-of-00002.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    table = quantized_embedding(find_embedding(tmp_path), np.array([4], dtype=np.int32), "float32")
    assert table.scale[0] == pytest.approx(weight[4].float().abs().max().item() * HIDDEN**0.5 / 127)


def test_a_checkpoint_without_embedding_says_so(tmp_path):
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"must hold one text embedding .* found: none"):
        find_embedding(tmp_path)


def test_missing_and_truncated_files_say_so(tmp_path, weight):
    with pytest.raises(CheckpointError, match=r"model.safetensors does not exist"):
        find_embedding(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({NAME: weight}, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        find_embedding(tmp_path)
