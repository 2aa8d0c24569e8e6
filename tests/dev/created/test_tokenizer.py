"""Filled tokenizers, and the embedded SLM with another vocabulary: the same rows under other ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hyco_export.core.files import CHECKPOINTS
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.created.tokenizer import SPECIALS, create_respelled, filler, write_tokenizer
from hyco_export.errors import CheckpointError


@pytest.fixture(scope="module")
def respelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_respelled(tmp_path_factory.mktemp("created") / "family").parent / "slm"


def test_fillers_take_the_ids_that_are_left(tmp_path: Path) -> None:
    write_tokenizer(CHECKPOINTS / "verifier", tmp_path, 2_100)
    filled = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = Tokenizer.from_file(str(CHECKPOINTS / "verifier" / "tokenizer.json"))
    assert filled.get_vocab_size() == 2_100
    assert filled.id_to_token(2_099) == filler(2_099) and filled.id_to_token(2_047) == plain.id_to_token(2_047)
    assert (tmp_path / "chat_template.jinja").is_file()


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {}}}))
    with pytest.raises(CheckpointError, match="is not a fast BPE tokenizer"):
        write_tokenizer(tmp_path, tmp_path, 100)


def test_rows_follow_their_tokens_to_their_new_ids(respelled: Path) -> None:
    ours = Tokenizer.from_file(str(CHECKPOINTS / "slm" / "tokenizer.json")).get_vocab()
    theirs = Tokenizer.from_file(str(respelled / "tokenizer.json")).get_vocab()
    assert len(theirs) < len(ours) and sorted(theirs.values()) == list(range(len(theirs)))
    old_names = {new: old for old, new in SPECIALS.items()}
    kept = np.array([ours[old_names.get(name, name)] for name in sorted(theirs, key=theirs.__getitem__)])
    assert not np.array_equal(kept, np.sort(kept))
    before, after = load_file(CHECKPOINTS / "slm" / "model.safetensors"), load_file(respelled / "model.safetensors")
    assert set(before) == set(after)
    for name in ("model.embed_tokens.embedding_quantized", "model.embed_tokens.embedding_scale", "lm_head.weight"):
        np.testing.assert_array_equal(after[name], before[name][kept])
    untouched = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(after[untouched], before[untouched])


def test_config_and_recipe_have_the_new_ids_and_names(respelled: Path) -> None:
    theirs = Tokenizer.from_file(str(respelled / "tokenizer.json"))
    config = json.loads((respelled / "config.json").read_text())
    assert config["vocab_size"] == config["vocab_size_per_layer_input"] == theirs.get_vocab_size()
    assert config["bos_token_id"] == theirs.token_to_id(SPECIALS["<bos>"])
    assert config["eos_token_id"] == [theirs.token_to_id(SPECIALS[name]) for name in ("<eos>", "<turn|>")]
    recipe = load_recipe(respelled.parent / "recipe.yaml")
    assert recipe.slm is not None and recipe.slm.bridge is not None and recipe.slm.bridge.specials == SPECIALS
