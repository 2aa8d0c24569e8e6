"""Generation configs: what changes texts is honoured as transformers' own `generate` does, or refused by its name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma4ForCausalLM

from hyco_export.core.recipe import Sampling
from hyco_export.errors import CheckpointError
from hyco_export.models.capture import greedy_answer, sampled_answers
from hyco_export.models.generation_rules import (
    CALLERS,
    HONOURED,
    WITHOUT_EFFECT,
    generation_notes,
    require_generation_rules,
    suppressed_ids,
)
from hyco_export.models.golden_tree import golden_tree
from hyco_export.models.text.tokenizer import open_tokenizer
from hyco_export.models.text.vocabulary import FixedPart, require_room
from hyco_export.models.verifier import load_verifier, read_tokenizer
from hyco_export.server.passes.head_drafter import ChainDrafter
from hyco_export.server.passes.verifier import Verifier
from tests.support import builders

PROMPT = [9, 33, 7, 120, 54]
NEW_TOKENS = 40
CHANGING = {  # every field that changes or ends texts, with a value that does
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5, 6]],
    "sequence_bias": [[[5], -4.0]],
    "min_length": 20,
    "min_new_tokens": 3,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 0,
    "exponential_decay_length_penalty": [15, 1.6],
    "begin_suppress_tokens": [7],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5},
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": ["a"],
    "force_words_ids": [[5]],
    "stop_strings": ["END"],
    "token_healing": True,
    "max_time": 1.0,
    "min_p": 0.05,
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "assistant_ensemble_weight": 0.3,
    "cache_implementation": "quantized",
}
HARMLESS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "min_length": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "cache_implementation": "static",
    "max_length": 64,
    "do_sample": True,
    "num_assistant_tokens": 3,
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.save_family(tmp_path_factory.mktemp("family"))


def with_config(family: Path, folder: Path, **fields: object) -> Path:
    """A copy of the verifier whose generation config has these fields too."""
    shutil.copytree(family / "verifier", folder / "verifier")
    path = folder / "verifier" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder / "verifier"


def suppressing(family: Path, folder: Path) -> tuple[Gemma4ForCausalLM, set[int]]:
    """A verifier that suppresses the tokens that it would say most often, stop ids left alone."""
    plain = load_verifier(family / "verifier", "float32")
    said = greedy_answer(plain, PROMPT, NEW_TOKENS)
    often = sorted(set(said) - {1, 6}, key=lambda token: -said.count(token))[:4]
    path = with_config(family, folder, suppress_tokens=[*often, 10**6, -1], eos_token_id=[1, 6])
    return load_verifier(path, "float32"), set(often)  # type: ignore[return-value]


def test_every_field_of_transformers_is_known_here() -> None:
    """A field that a newer transformers brings is refused until somebody has decided what it is."""
    from transformers import GenerationConfig

    fields = set(vars(GenerationConfig()))
    assert fields == set(CHANGING) | HONOURED | CALLERS | WITHOUT_EFFECT
    assert not set(CHANGING) & (HONOURED | CALLERS | WITHOUT_EFFECT)


@pytest.mark.parametrize("field", CHANGING)
def test_what_a_tree_verifier_cannot_do_is_refused_by_name(family: Path, tmp_path: Path, field: str) -> None:
    folder = with_config(family, tmp_path, **{field: CHANGING[field]})
    with pytest.raises(CheckpointError, match=f"sets {field} to .*remove {field} from generation_config.json"):
        require_generation_rules(folder)


def test_a_refused_checkpoint_is_not_loaded(family: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"repetition_penalty to 1\.1"):
        load_verifier(with_config(family, tmp_path, repetition_penalty=1.1), "float32")


@pytest.mark.parametrize("field", HARMLESS)
def test_values_that_change_nothing_are_taken(family: Path, tmp_path: Path, field: str) -> None:
    require_generation_rules(with_config(family, tmp_path, **{field: HARMLESS[field]}))


def test_fields_in_the_models_config_count_where_there_is_no_generation_config(family: Path, tmp_path: Path) -> None:
    folder = with_config(family, tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"suppress_tokens": [12, 40]}))
    assert suppressed_ids(load_verifier(folder, "float32")) == (12, 40)
    (folder / "config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 3}))
    with pytest.raises(CheckpointError, match="no_repeat_ngram_size to 3"):
        require_generation_rules(folder)


@pytest.mark.parametrize("stops", [["1", "6"], "<eos>", [[1], [6]], {"a": 1}, 1.5, True])
def test_stop_ids_that_are_no_ids(family: Path, tmp_path: Path, stops: object) -> None:
    folder = with_config(family, tmp_path, eos_token_id=stops)
    for reader in (require_generation_rules, open_tokenizer, read_tokenizer):
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is .* must be a token id or"):
            reader(folder)


def test_an_id_of_the_models_config_that_is_none(family: Path, tmp_path: Path) -> None:
    folder = with_config(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision": {"image_token_id": "7"}}))
    with pytest.raises(CheckpointError, match=r"/config\.json: image_token_id is '7', it must be a token id"):
        open_tokenizer(folder)


def test_a_verifier_that_generates_nothing_is_refused_by_the_field_that_says_so() -> None:
    none = np.zeros(8, dtype=bool)
    with pytest.raises(CheckpointError, match="suppress_tokens holds all 8 tokens of its vocabulary"):
        require_room(4, FixedPart(none, none, none, none, ~none), 8)


def test_answers_that_cannot_end_are_said(family: Path, tmp_path: Path) -> None:
    folder = with_config(family, tmp_path, eos_token_id=[1, 6], suppress_tokens=[1, 6, 9])
    assert any("suppresses every id that ends an answer" in note for note in generation_notes(folder, Sampling()))


@pytest.mark.parametrize("listed", ["5", ["a"], [1.5], [[753]], {"a": 1}, 7])
def test_suppressed_tokens_that_are_no_ids(family: Path, tmp_path: Path, listed: object) -> None:
    with pytest.raises(CheckpointError, match=r"suppress_tokens .* must be a list of token ids"):
        require_generation_rules(with_config(family, tmp_path, suppress_tokens=listed))


def test_a_generation_config_that_cannot_be_read_is_not_passed_over(family: Path, tmp_path: Path) -> None:
    folder = with_config(family, tmp_path)
    (folder / "generation_config.json").write_text('{"suppress_tokens": [')
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        load_verifier(folder, "float32")


def test_what_is_replaced_and_what_is_unknown_is_said(family: Path, tmp_path: Path) -> None:
    folder = with_config(family, tmp_path, do_sample=True, temperature=0.7, top_k=64, top_p=0.95, novelty=3)
    first, second = generation_notes(folder, Sampling())
    assert "temperature 0.7; $.sampling.temperature, 1.0, is used" in first
    assert "sets novelty" in second


def test_greedy_texts_are_those_of_transformers_generate(family: Path, tmp_path: Path) -> None:
    model, suppressed = suppressing(family, tmp_path)
    prompt = torch.tensor([PROMPT])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
    found = greedy_answer(model, PROMPT, NEW_TOKENS)
    assert found == wanted[0, len(PROMPT) :].tolist()
    assert not set(found) & suppressed
    assert found != greedy_answer(load_verifier(family / "verifier", "float32"), PROMPT, NEW_TOKENS)
    drawn = sampled_answers(model, PROMPT, NEW_TOKENS, 4, Sampling(temperature=2.0, top_k=0, top_p=1.0), seed=3)
    assert not suppressed & {token for answer in drawn for token in answer}


@pytest.mark.parametrize("fused", [True, False])
def test_no_row_of_a_tree_and_no_chain_holds_a_suppressed_token(family: Path, tmp_path: Path, fused: bool) -> None:
    import numpy as np

    model, suppressed = suppressing(family, tmp_path)
    wanted = greedy_answer(model, PROMPT, 8)
    ids, rows = sorted(suppressed), np.array(PROMPT)
    drafter = ChainDrafter(builders.small_head(model.config.vocab_size), fused=fused, suppressed=suppressed_ids(model))
    session = Verifier(model, drafter, fused=fused).open()
    first = session.prime(rows)
    assert int(first.argmax()) == wanted[0] and np.isneginf(first[ids]).all()
    tree = np.array([wanted[1], ids[0], wanted[2]]), np.array([-1, -1, 0])
    logits = session.verify(wanted[0], *tree)
    assert np.isneginf(logits[:, ids]).all() and np.isfinite(np.delete(logits, ids, axis=1)).all()
    assert [int(logits[row].argmax()) for row in (0, 1, 3)] == wanted[1:4]
    session.commit((0, 2))
    assert not suppressed & set(session.draft(wanted[3], 6))


def test_golden_trees_hold_no_suppressed_token(family: Path, tmp_path: Path) -> None:
    model, suppressed = suppressing(family, tmp_path)
    answer = greedy_answer(model, PROMPT, NEW_TOKENS)
    tree = golden_tree(model, [*PROMPT, *answer], len(PROMPT), Sampling())
    assert tree is not None and not suppressed & {tree.root, *tree.tokens}
