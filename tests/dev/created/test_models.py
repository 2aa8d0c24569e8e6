"""Created tensors keep activations in range, and shards are laid out as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyco_export.dev.created.models import LINEAR_SPREAD, drawn, write_head, write_shards
from hyco_export.models.families.released_configs import SMALL

EMPTY = {name: torch.empty(10, 8, device="meta") for name in ("a", "b", "c")}  # 320 bytes each


def draw(name: str, *shape: int) -> torch.Tensor:
    return drawn(name, torch.Size(shape), torch.Generator().manual_seed(0)).float()


def test_spreads_of_tables_and_matrices_and_the_ranges_of_norms() -> None:
    assert draw("model.embed_tokens.weight", 400, 64).std() * 64**0.5 == pytest.approx(1.0, abs=0.02)
    assert draw("model.layers.0.mlp.up_proj.weight", 400, 64).std() * 64**0.5 == pytest.approx(LINEAR_SPREAD, abs=0.03)
    norm, query = draw("model.norm.weight", 500), draw("model.layers.0.self_attn.q_norm.weight", 64)
    assert 0.5 <= norm.min() < 0.6 and 1.4 < norm.max() <= 1.5
    assert query.min() >= 0.5 / 8 and query.max() <= 1.5 / 8  # around 64 ** -0.5
    assert draw("model.layers.0.layer_scalar", 1).tolist() == [1.0]


def test_shards_are_drawn_in_their_order_and_the_index_names_them(tmp_path: Path) -> None:
    order: list[str] = []
    shares: list[float] = []

    def ones(name: str) -> torch.Tensor:
        order.append(name)
        return torch.full((10, 8), float(len(order)))

    write_shards(tmp_path, EMPTY, 700, ones, shares.append)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 960
    files = index["weight_map"]
    assert set(files) == set(EMPTY) and len(set(files.values())) == 2
    for name, file in files.items():
        assert (load_file(tmp_path / file)[name] == order.index(name) + 1).all()
        assert (tmp_path / file).stat().st_mode & 0o777 == 0o644
    assert shares == [pytest.approx(part / 3) for part in (1, 2, 3)]


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_shards(tmp_path, EMPTY, 1000, lambda name: torch.zeros(10, 8), lambda share: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_tied_output_layer_is_not_stored(tmp_path: Path) -> None:
    write_head(tmp_path / "head", SMALL, 0, lambda share: None)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["Gemma4AssistantForCausalLM"] and config["dtype"] == "bfloat16"
