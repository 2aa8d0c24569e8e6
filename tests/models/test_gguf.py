"""A GGUF file becomes an ordinary checkpoint once, whole or not at all."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM

from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import CheckpointError
from hyco_export.models import gguf
from hyco_export.models.checkpoints import checkpoint_folder, local_checkpoint, next_step
from hyco_export.models.slm.float import FloatCheckpoint, Rounding
from hyco_export.models.verifier import load_language_model, read_tokenizer
from tests.support.float_slm import gemma3_config, save_float_slm
from tests.support.tiny_gguf import VOCAB, write_gguf, write_gguf_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / gguf.CACHE_FOLDER


def checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(model=str(path.parent), gguf_file=path.name, dtype="float32")


def test_weights_config_and_tokenizer_arrive(tmp_path: Path, cache: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    folder = checkpoint_folder(checkpoint(tmp_path / "tiny.gguf"))
    assert folder.parent == cache
    read = FloatCheckpoint(folder, Rounding(8, 8, np.array([1.0])))
    assert (read.config.model_type, read.config.vocab_size, read.config.sliding_window) == ("gemma3_text", VOCAB, 8)
    np.testing.assert_array_equal(read.vector("model.embed_tokens.weight"), tensors["token_embd.weight"])
    np.testing.assert_array_equal(read.vector("model.layers.2.mlp.down_proj.weight"), tensors["blk.2.ffn_down.weight"])
    np.testing.assert_allclose(read.vector("model.norm.weight"), tensors["output_norm.weight"] - 1, atol=1e-6)
    load_language_model(folder, "float32")  # nothing missing
    assert read_tokenizer(folder)("ab").input_ids[0] == 2  # <bos>


def test_the_second_time_nothing_is_converted(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = checkpoint_folder(checkpoint(tmp_path / "tiny.gguf"))
    monkeypatch.delattr(gguf, "_convert")
    assert checkpoint_folder(checkpoint(tmp_path / "tiny.gguf")) == first


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path, dtype: str, out_dir: Path) -> None:
        (out_dir / "config.json").write_text("{}")
        raise KeyboardInterrupt

    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_folder(checkpoint(tmp_path / "tiny.gguf"))
    assert list(cache.iterdir()) == []


def test_a_dry_run_knows_whether_a_file_is_imported(tmp_path: Path, cache: Path) -> None:
    wanted = checkpoint(tmp_path / "tiny.gguf")
    assert local_checkpoint(wanted, None) is None
    assert next_step(wanted, None) == "put tiny.gguf there"
    write_gguf(tmp_path / "tiny.gguf")
    assert local_checkpoint(wanted, None) is None
    assert next_step(wanted, None) == "tiny.gguf is here: the first build imports it"
    assert not cache.exists()
    folder = checkpoint_folder(wanted)
    assert local_checkpoint(wanted, None) == folder
    fetched = Checkpoint(model="somebody/else", gguf_file="tiny.gguf")
    assert local_checkpoint(fetched, None) is None
    assert next_step(fetched, None) == "run: hf download somebody/else"


def test_missing_and_broken_files_are_named(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf does not exist"):
        checkpoint_folder(checkpoint(tmp_path / "none.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"GGUF file .*broken\.gguf cannot be read"):
        checkpoint_folder(checkpoint(tmp_path / "broken.gguf"))
    assert list(cache.iterdir()) == []


LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
GLOBAL = {"rope_type": "default", "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
ORIGINALS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # layers, fields of the original, further keys
    "linear scaling": ("SSSSSF", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}, {}),
    "a factor without a kind is linear": (
        "SSSSSF",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
        {"rope.scaling.type": None},
    ),
    "soft-cap": ("SSSSSF", {"final_logit_softcapping": 2.0}, {}),
    "scale of scores": ("SSSSSF", {"query_pre_attn_scalar": 24}, {"attention.scale": 24**-0.5}),
    "local rotary base": (
        "SSSSSF",
        {
            "rope_parameters": {
                "full_attention": {**LOCAL, "rope_theta": 5e5},
                "sliding_attention": LOCAL | {"rope_theta": 777.0},
            }
        },
        {"rope.freq_base_swa": 777.0},
    ),
    "period of layers": ("SFSFSF", {}, {"attention.sliding_window_pattern": 2}),
    "layers one by one": ("FSSFFS", {}, {"attention.sliding_window_pattern": [False, True, True, False, False, True]}),
    "epsilon": ("SSSSSF", {"rms_norm_eps": 0.25}, {}),
    "output of its own": ("SSSSSF", {"tie_word_embeddings": False}, {}),
    "no scaling after all": ("SSSSSF", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}),
}


def original(folder: Path, pattern: str, fields: Mapping[str, Any]) -> Gemma3ForCausalLM:
    """A checkpoint that never was a GGUF; without fields llama.cpp's own choices where a file says nothing."""
    usual = {
        "query_pre_attn_scalar": 8,
        "rope_parameters": {"full_attention": LOCAL | {"rope_theta": 1e6}, "sliding_attention": LOCAL},
    }
    config = gemma3_config(pattern, vocab_size=VOCAB, **usual | dict(fields))
    save_float_slm(folder, config)
    return Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_are_those_of_the_checkpoint_that_never_was_a_gguf(name: str, tmp_path: Path, cache: Path) -> None:
    pattern, fields, keys = ORIGINALS[name]
    model = original(tmp_path / "original", pattern, fields)
    write_gguf_of(model, tmp_path / "tiny.gguf", keys)
    imported = load_language_model(checkpoint_folder(checkpoint(tmp_path / "tiny.gguf")), "float32")
    ids = torch.randint(4, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = model(ids).logits, imported(ids).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_the_largest_model_divides_scores_by_its_own_number() -> None:
    wide = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    assert gguf._score_divisor({}, wide, Path("27b.gguf")) == 168
    assert gguf._score_divisor({}, {**wide, "num_hidden_layers": 34}, Path("4b.gguf")) == 128


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.type is 'yarn', only 'none' and 'linear'",
        ),
        ({"rope.scaling.yarn_beta_fast": 32.0}, "rope.scaling.yarn_beta_fast is 32.0, which is not mapped"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, only 0.0 fits"),
        ({"attention.causal": False}, "attention.causal is False, only True fits"),
        ({"expert_count": 8}, "expert_count is 8, only 0 fits"),
        ({"attention.value_length": 16}, "attention.value_length is 16, only 8 fits"),
        ({"rope.dimension_count": 4}, "rope.dimension_count is 4, only 8 fits"),
        ({"vocab_size": 7}, f"vocab_size is 7, only {VOCAB} fits"),
        ({"attention.scale": 0.3}, "attention.scale is 0.3"),
        ({"attention.shared_kv_layers": 2}, "attention.shared_kv_layers is 2, which is not mapped"),
        ({"attention.sliding_window": None}, "has no gemma3.attention.sliding_window"),
        ({"rope.scaling.factor": -8.0}, "rope.scaling.factor is -8.0, it must be finite and not negative"),
        ({"rope.scaling.factor": float("inf")}, "rope.scaling.factor is inf, it must be finite"),
        ({"rope.scaling.factor": float("nan")}, "rope.scaling.factor is nan, it must be finite"),
        ({"rope.freq_base": 0.0}, "rope.freq_base is 0.0, it must be finite and greater than 0"),
        ({"rope.freq_base_swa": float("nan")}, "rope.freq_base_swa is nan, it must be finite and greater than 0"),
        ({"attention.scale": -0.5}, "attention.scale is -0.5, it must be finite and not negative"),
        ({"attention.scale": float("inf")}, "attention.scale is inf, it must be finite and not negative"),
        ({"final_logit_softcapping": -5.0}, "final_logit_softcapping is -5.0, it must be finite and not negative"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping is nan, it must be finite"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan, it must be finite and greater"),
        ({"attention.sliding_window": 0}, "attention.sliding_window is 0, it must be a whole number greater than 0"),
        ({"context_length": 0}, "context_length is 0, it must be a whole number greater than 0"),
        ({"attention.head_count_kv": [1] * 6}, "attention.head_count_kv is [1, 1, 1, 1, 1, 1], it must be a whole"),
        ({"attention.sliding_window_pattern": 0}, "sliding_window_pattern is 0, it must be a period greater than 0"),
        ({"attention.sliding_window_pattern": [True] * 9}, "it must be a period greater than 0, or a list"),
        ({"rope.freq_base": None}, "has no gemma3.rope.freq_base"),
    ],
)
def test_keys_that_no_config_holds_are_refused_by_name(
    keys: Mapping[str, Any], words: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf_of(original(tmp_path / "original", "SSSSSF", {}), tmp_path / "tiny.gguf", keys)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_folder(checkpoint(tmp_path / "tiny.gguf"))
    assert words in caught.value.message
    assert list(cache.iterdir()) == []


def test_other_architectures_and_missing_tensors_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    model = original(tmp_path / "original", "SSSSSF", {})
    write_gguf_of(model, tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(data.replace(b"gemma3", b"gemma4"))
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'gemma4', only 'gemma3' is mapped"):
        checkpoint_folder(checkpoint(tmp_path / "other.gguf"))
    (tmp_path / "renamed.gguf").write_bytes(data.replace(b"blk.0.attn_q_norm", b"blk.0.rope_freqs1"))
    with pytest.raises(CheckpointError, match=r"has no tensor blk\.0\.attn_q_norm\.weight"):
        checkpoint_folder(checkpoint(tmp_path / "renamed.gguf"))


def test_two_imports_at_once_are_one(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    converted = []
    convert, begun = gguf._convert, threading.Barrier(2)

    def counted(path: Path, dtype: Any, out_dir: Path) -> None:
        converted.append(path)
        convert(path, dtype, out_dir)

    def ask() -> None:
        begun.wait()
        folders.append(checkpoint_folder(checkpoint(tmp_path / "tiny.gguf")))

    folders: list[Path] = []
    monkeypatch.setattr(gguf, "_convert", counted)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 1
    assert folders[0] == folders[1]
    assert list(cache.iterdir()) == folders[:1]


def test_where_folders_cannot_be_locked_the_faster_import_stays(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = gguf._convert

    def overtaken(path: Path, dtype: Any, out_dir: Path) -> None:
        convert(path, dtype, gguf.import_folder(path, dtype))
        convert(path, dtype, out_dir)

    write_gguf(tmp_path / "tiny.gguf")
    gguf.import_folder(tmp_path / "tiny.gguf", "float32").parent.mkdir(parents=True)
    monkeypatch.setattr(gguf, "_convert", overtaken)
    assert list(cache.iterdir()) == []
    folder = checkpoint_folder(checkpoint(tmp_path / "tiny.gguf"))
    assert list(cache.iterdir()) == [folder]
