"""A GGUF file becomes an ordinary checkpoint once, whole or not at all."""

from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import VOCAB, write_gguf

from hyco_export.core.recipe import Checkpoint
from hyco_export.errors import CheckpointError
from hyco_export.nn import gguf_import
from hyco_export.nn.checkpoint import checkpoint_folder, local_checkpoint, next_step
from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint, Rounding
from hyco_export.nn.verifier import load_language_model, read_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / gguf_import.CACHE_FOLDER


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
    monkeypatch.delattr(gguf_import, "_convert")
    assert checkpoint_folder(checkpoint(tmp_path / "tiny.gguf")) == first


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: Path, dtype: str, out_dir: Path) -> None:
        (out_dir / "config.json").write_text("{}")
        raise KeyboardInterrupt

    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_import, "_convert", stop)
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
