"""Which files hold a checkpoint's weights, the same for every reader, and whether their values are numbers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import CheckpointError
from hyco_export.models import checkpoints
from hyco_export.models.embedding_table import find_embedding, quantized_embedding
from hyco_export.models.tensor_files import (
    INDEX_NAME,
    SINGLE_NAME,
    TensorFiles,
    all_finite,
    require_all_read,
    weight_files,
)
from hyco_export.models.verifier import load_head, load_verifier
from tests.support import builders

EMBEDDING = "model.embed_tokens.weight"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    return builders.save_family(tmp_path) / "verifier"


def shard(folder: Path, factor: float = 1.0) -> None:
    """Write the same model in two files and an index, its embedding times `factor`; the single file stays."""
    tensors = load_file(folder / SINGLE_NAME)
    tensors[EMBEDDING] = tensors[EMBEDDING] * factor
    names = sorted(tensors)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, part in zip(SHARDS, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    owners = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": owners}))


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def require_one_answer(folder: Path) -> None:
    """Server, table and plain reading see what transformers loads by itself."""
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight
    assert torch.equal(load_verifier(folder, "float32").get_input_embeddings().weight, wanted)
    assert np.array_equal(TensorFiles(folder).get(EMBEDDING), wanted.detach().numpy())
    ids = np.arange(4)
    table = quantized_embedding(find_embedding(folder), ids, "float32")
    real = wanted[:4].detach().numpy() * np.float32(builders.HIDDEN**0.5)
    assert np.all(np.abs(table.integers * table.scale[:, None] - real) <= table.scale[:, None] * 0.5001)


def test_a_single_file_goes_before_an_index(verifier: Path) -> None:
    shard(verifier, 1.5)
    assert weight_files(verifier) == (verifier / SINGLE_NAME,)
    require_one_answer(verifier)


def test_shards_are_those_of_the_index_and_what_is_left_over_counts_nowhere(verifier: Path) -> None:
    shard(verifier, 1.5)
    (verifier / SINGLE_NAME).rename(verifier / "consolidated.safetensors")
    digest = checkpoints.checkpoint_digest(verifier)
    save_file({EMBEDDING: torch.zeros(3)}, verifier / "model-00003-of-00003.safetensors")
    (verifier / "consolidated.safetensors").write_bytes(b"not read")
    assert [path.name for path in weight_files(verifier)] == list(SHARDS)
    require_one_answer(verifier)
    assert checkpoints.checkpoint_digest(verifier) == digest


def test_a_file_that_the_config_names_goes_before_all(verifier: Path) -> None:
    shard(verifier, 1.5)
    tensors = load_file(verifier / SINGLE_NAME)
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING] * 2}, verifier / "best.safetensors", metadata={"format": "pt"})
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "transformers_weights": "best.safetensors"}))
    assert [path.name for path in weight_files(verifier)] == ["best.safetensors"]
    require_one_answer(verifier)


def test_a_snapshot_of_links_is_read_through_them(verifier: Path, tmp_path: Path) -> None:
    shard(verifier)
    (verifier / SINGLE_NAME).unlink()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, name in enumerate((*SHARDS, INDEX_NAME)):
        (verifier / name).rename(blobs / str(number))
        (verifier / name).symlink_to(os.path.relpath(blobs / str(number), verifier))
    require_one_answer(verifier)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / SHARDS[1]).unlink(),
            f"{SHARDS[1]} does not exist; {INDEX_NAME} names 2",
        ),
        (
            lambda folder: edit_index(folder, lambda owners: owners.update({"model.none": SHARDS[0]})),
            "the index names model.none, which none of its files holds",
        ),
        (
            lambda folder: save_file(load_file(folder / SHARDS[0]), folder / SHARDS[1]),
            f"both {SHARDS[0]} and {SHARDS[1]} hold",
        ),
        (lambda folder: (folder / INDEX_NAME).write_text("[1]"), "is not a safetensors index"),
        (lambda folder: (folder / INDEX_NAME).write_text('{"weight_map": {"a": 1}}'), "is not a safetensors index"),
        (lambda folder: (folder / INDEX_NAME).unlink(), f"weights are not read from {SHARDS[0]}, {SHARDS[1]}"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
    ],
)
def test_files_that_do_not_fit_are_named(verifier: Path, spoil: Callable[[Path], None], words: str) -> None:
    shard(verifier)
    (verifier / SINGLE_NAME).unlink()
    spoil(verifier)
    with pytest.raises(CheckpointError) as caught:
        TensorFiles(verifier)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["sub/a.safetensors", "../a.safetensors", "{folder}/sub/a.safetensors"])
def test_weights_in_another_folder_are_read_by_nobody(verifier: Path, name: str) -> None:
    (verifier / "sub").mkdir()
    tensors = load_file(verifier / SINGLE_NAME)
    (verifier / SINGLE_NAME).rename(verifier / "sub" / "a.safetensors")
    save_file(tensors, verifier.parent / "a.safetensors", metadata={"format": "pt"})
    save_file({**tensors, EMBEDDING: tensors[EMBEDDING] * 1.5}, verifier / "a.safetensors", metadata={"format": "pt"})
    stated = name.format(folder=verifier)
    (verifier / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, stated)}))
    for reader in (TensorFiles, load_verifier, checkpoints.checkpoint_digest):
        with pytest.raises(CheckpointError, match=f"{INDEX_NAME} names '{stated}', weights are read from"):
            reader(verifier)
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "transformers_weights": stated}))
    with pytest.raises(CheckpointError, match=f"config.json names '{stated}', weights are read from"):
        TensorFiles(verifier)


def test_towers_of_a_multimodal_checkpoint_are_not_the_text_models(verifier: Path) -> None:
    files, read = TensorFiles(verifier), {"model.layers.0.norm.weight", "lm_head.weight"}
    names = {*read, "model.vision_tower.layers.0.norm.bias", "audio_tower.norm.weight"}
    require_all_read(files, names, read, (), whole=False)
    with pytest.raises(CheckpointError, match=r"holds 2 tensors .* first audio_tower\.norm\.weight"):
        require_all_read(files, names, read, (), whole=True)
    inside = {"lm_head.bias", "model.layers.0.norm.bias"}
    with pytest.raises(CheckpointError, match=r"holds 2 tensors .* first lm_head\.bias"):
        require_all_read(files, names | inside, read, (), whole=False)
    require_all_read(files, names | inside, read, (r"\.bias$",), whole=False)


def test_pickled_weights_are_read_by_nobody(verifier: Path) -> None:
    torch.save(load_file(verifier / SINGLE_NAME), verifier / "pytorch_model.bin")
    (verifier / SINGLE_NAME).unlink()
    for reader in (TensorFiles, load_verifier, checkpoints.checkpoint_digest):
        with pytest.raises(CheckpointError, match=r"weights are not read from pytorch_model\.bin") as caught:
            reader(verifier)
        assert "save_pretrained" in caught.value.hint


def test_half_a_snapshot_is_yet_to_be_fetched(verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(verifier)
    (verifier / SINGLE_NAME).unlink()
    monkeypatch.setattr(checkpoints, "snapshot_download", lambda *_, **__: str(verifier))
    assert checkpoints.local_checkpoint(Checkpoint(model="owner/name"), None) == verifier
    (verifier / SHARDS[0]).unlink()
    assert checkpoints.local_checkpoint(Checkpoint(model="owner/name"), None) is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_in_many_is_seen(dtype: torch.dtype, value: float) -> None:
    tensor = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert all_finite(tensor)
    tensor[171, 3] = value
    assert not all_finite(tensor)


def test_what_cannot_be_infinite_is_finite() -> None:
    assert all_finite(torch.tensor([2**31 - 1]))
    assert all_finite(torch.zeros(0, 4))
    assert all_finite(torch.tensor(1.0))
    assert all_finite(torch.ones(4, 4).to(torch.float8_e4m3fn))
    assert not all_finite(torch.full((4, 4), float("nan")).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("role", "tensor", "place"),
    [
        ("verifier", "model.layers.3.mlp.down_proj.weight", (1, 3)),
        ("verifier", "model.embed_tokens.weight", (9, 0)),
        ("verifier", "model.norm.weight", (2,)),
        ("head", "post_projection.weight", (0, 1)),
    ],
)
def test_an_infinite_weight_is_named_with_its_file(
    tmp_path: Path, role: str, tensor: str, place: tuple[int, ...]
) -> None:
    path = builders.save_family(tmp_path) / role / SINGLE_NAME
    tensors = load_file(path)
    tensors[tensor][place] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        (load_verifier if role == "verifier" else load_head)(path.parent, "bfloat16")
    assert f"{role}/{SINGLE_NAME}: {tensor} holds inf at {list(place)} (1 of" in caught.value.message


def test_a_value_that_only_the_wanted_precision_cannot_hold_is_told_apart(verifier: Path) -> None:
    tensors = load_file(verifier / SINGLE_NAME)
    tensors["model.norm.weight"][0] = torch.finfo(torch.float32).max
    save_file(tensors, verifier / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is finite in the file and not in torch\.bfloat16"):
        load_verifier(verifier, "bfloat16")
    load_verifier(verifier, "float32")
