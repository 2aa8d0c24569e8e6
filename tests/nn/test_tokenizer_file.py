"""Opening a checkpoint's tokenizer without transformers: same entries, same specials, clear refusals."""

import json

import pytest

from hyco_export.errors import CheckpointError
from hyco_export.nn.tokenizer_file import TokenizerFile, open_tokenizer
from hyco_export.nn.vocabulary import special_ids
from tests.builders import small_tokenizer


def test_entries_and_specials_are_those_of_transformers(tmp_path):
    whole = small_tokenizer()
    whole.save_pretrained(tmp_path)
    opened = open_tokenizer(tmp_path)
    assert opened.backend.get_vocab() == whole.get_vocab()
    assert set(whole.all_special_ids) <= set(special_ids(opened, len(whole)).tolist())
    assert set(whole.all_special_tokens) <= opened.special_names | {
        token.content for token in whole.added_tokens_decoder.values() if token.special
    }


def test_names_in_the_configuration_are_special_whatever_their_form(tmp_path):
    whole = small_tokenizer()
    whole.save_pretrained(tmp_path)
    config = {
        "eos_token": {"content": "a", "lstrip": False},
        "boi_token": "b",
        "pad_token": None,
        "extra_special_tokens": {"audio": "c"},
        "additional_special_tokens": ["d", {"content": "e"}, "not an entry"],
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_tokenizer(tmp_path)
    assert opened.special_names == {"a", "b", "c", "d", "e", "not an entry"}
    marked = special_ids(TokenizerFile(opened.backend), len(whole)).tolist()
    named = {whole.get_vocab()[name] for name in "abcde" if name in whole.get_vocab()}
    assert named and sorted({*marked, *named}) == special_ids(opened, len(whole)).tolist()


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer of .* cannot be read"):
        open_tokenizer(tmp_path)
