"""Checkpoints that do not belong together are refused with their sizes, or with the tokens that differ."""

from pathlib import Path

import pytest

from hyco_export.errors import CheckpointError
from hyco_export.models.families.checks import check_family, check_vocabularies, family_remarks, vocabulary_mismatch
from tests.support import builders

VOCAB = 60


def test_a_head_that_looks_back_otherwise_than_its_verifier_is_said():
    verifier, head = builders.small_verifier(VOCAB).config, builders.small_head(VOCAB).config
    assert list(family_remarks(verifier, head)) == []
    head.text_config.sliding_window = 3
    check_family(verifier, head)
    (line,) = family_remarks(verifier, head)
    assert line.startswith("sliding_window of $.models.head is 3, that of the verifier")


def test_a_head_with_kv_of_its_own_is_refused():
    head = builders.small_head(VOCAB).config
    head.text_config.num_kv_shared_layers = 0
    with pytest.raises(CheckpointError, match="the head's layer 0 computes K/V of its own"):
        check_family(builders.small_verifier(VOCAB, "SSFSF").config, head)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_dim": 12}, "the head reads sliding K/V of 2 heads x 12, the verifier gives 2 x 8"),
        ({"num_global_key_value_heads": 2}, "the head reads full K/V of 2 heads x 16, the verifier gives 1 x 16"),
    ],
)
def test_other_kv_shapes_are_named(fields, words):
    with pytest.raises(CheckpointError, match=words):
        check_family(builders.small_verifier(VOCAB).config, builders.small_head(VOCAB, **fields).config)


def test_models_in_each_others_places_are_refused() -> None:
    verifier, head = builders.small_verifier(VOCAB).config, builders.small_head(VOCAB).config
    with pytest.raises(CheckpointError, match=r"\$\.models\.head is a 'gemma4_text' model, the head must be a gemma4_"):
        check_family(verifier, verifier)
    with pytest.raises(CheckpointError, match=r"\$\.models\.verifier is a 'gemma4_assistant' model"):
        check_family(head, None)


def test_a_bridged_slm_may_have_another_vocabulary() -> None:
    verifier, slm = builders.small_verifier(VOCAB).config, builders.text_config("SF", VOCAB + 2, 8)
    with pytest.raises(CheckpointError, match="the SLM's vocabulary has 62 tokens, the verifier's 60"):
        check_family(verifier, None, slm)
    check_family(verifier, None, slm, bridged=True)


def test_only_tokens_that_both_know_must_have_the_same_ids() -> None:
    ours = {"a": 0, "b": 1, "<unused3>": 2, "c": 3, "<image>": 9}
    assert vocabulary_mismatch(ours, {"a": 0, "b": 1, "<unused3>": 3, "c": 3}, rows=8) == ""
    assert vocabulary_mismatch(ours, {"a": 0, "b": 1, "d": 2, "c": 3, "<image>": 8}, rows=8) == ""
    moved = vocabulary_mismatch(ours, {"a": 1, "b": 0, "c": 3}, rows=8)
    assert moved == "2 of 3 tokens have other ids in the SLM's tokenizer, among them 'a', 'b'"
    other = vocabulary_mismatch(ours, {"x": 0, "y": 1, "c": 3}, rows=8)
    assert other == "only 1 of 3 ids stand for the same token in the SLM's tokenizer"


def test_tokenizers_are_compared_where_both_folders_have_one(tmp_path: Path) -> None:
    for name in ("verifier", "same", "other"):
        builders.small_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "without").mkdir()
    check_vocabularies(tmp_path / "verifier", tmp_path / "same", 400)
    check_vocabularies(tmp_path / "verifier", tmp_path / "without", 400)
    path = tmp_path / "other" / "tokenizer.json"
    content = path.read_text()
    assert '"<0x41>": ' in content
    path.write_text(content.replace('"<0x41>": ', '"<0xXX>": ').replace('"<0x42>": ', '"<0x41>": '))
    with pytest.raises(CheckpointError, match=r"belong together: 1 of \d+ tokens have other ids .* '<0x41>'"):
        check_vocabularies(tmp_path / "verifier", tmp_path / "other", 400)
