"""Checkpoints are found, loaded whole or refused by name; the layers that feed the head come from the config."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig

from hyco_export.core.handoff import KvShape
from hyco_export.errors import CheckpointError
from hyco_export.models.families.checks import check_family
from hyco_export.models.families.config_fields import require_full_precision
from hyco_export.models.verifier import (
    handoff_layers,
    handoff_values,
    kv_shapes,
    load_config,
    load_head,
    load_tokenizer,
    load_verifier,
    stop_ids,
)
from tests.support import builders

VOCAB = 60


@pytest.fixture
def family(tmp_path):
    return builders.save_family(tmp_path)


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_saved_family_loads_in_the_wanted_precision(family):
    verifier = load_verifier(family / "verifier", "bfloat16")
    head = load_head(family / "head", "float32")

    assert verifier.dtype == torch.bfloat16
    assert head.dtype == torch.float32
    assert not verifier.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert stop_ids(verifier) == (1, 6)
    assert load_tokenizer(family / "verifier").chat_template
    check_family(verifier.config, head.config)


def test_a_missing_tensor_is_an_error_not_a_random_weight(family):
    rewrite(family / "head", lambda tensors: tensors.pop("pre_projection.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, first pre_projection\.weight"):
        load_head(family / "head")


def test_a_truncated_file_is_named(family):
    path = family / "verifier" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="verifier cannot be loaded"):
        load_verifier(family / "verifier")


def test_a_misshaped_tensor_is_refused(family):
    rewrite(family / "head", lambda tensors: tensors.update({"post_projection.weight": torch.zeros(3, 3)}))
    with pytest.raises(CheckpointError, match="head cannot be loaded"):
        load_head(family / "head")


def test_a_verifier_is_not_a_head(family):
    with pytest.raises(CheckpointError, match=r"holds a 'gemma4_text' model, the head must be a gemma4_assistant"):
        load_head(family / "verifier")


def test_a_tokenizer_without_chat_template_is_refused(family):
    (family / "verifier" / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        load_tokenizer(family / "verifier")


def test_a_template_that_only_processors_read_gets_its_next_step(family):
    (family / "verifier" / "chat_template.jinja").unlink()
    (family / "verifier" / "chat_template.json").write_text('{"chat_template": "x"}')
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not read") as caught:
        load_tokenizer(family / "verifier")
    assert caught.value.hint == "write the template of chat_template.json to chat_template.jinja"


def test_a_tokenizer_configuration_that_is_a_list_is_named(family):
    (family / "verifier" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read: Expected `object`, got `array`"):
        load_tokenizer(family / "verifier")


def edit_text_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config.get("text_config", config))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_kv_shared_layers", -1, "must not be negative"),
        ("num_kv_shared_layers", -2, "must not be negative"),
        ("num_kv_shared_layers", 99, "num_kv_shared_layers is 99"),
        ("hidden_size_per_layer_input", -4, "must not be negative"),
        ("sliding_attention.rope_theta", 0.0, "must be finite and greater than 0"),
        ("sliding_attention.rope_theta", float("inf"), "must be finite and greater than 0"),
        ("full_attention.factor", -8.0, "must be finite and greater than 0"),
        ("full_attention.partial_rotary_factor", 3.0, "must be greater than 0 and at most 1"),
        ("full_attention.partial_rotary_factor", 0.0, "must be greater than 0 and at most 1"),
        ("full_attention.partial_rotary_factor", float("nan"), "must be greater than 0 and at most 1"),
    ],
)
def test_numbers_that_no_model_can_have_are_named(family, field, value, rule):
    def change(text):
        kind, _, name = field.rpartition(".")
        (text["rope_parameters"][kind] if kind else text)[name] = value

    for role in ("verifier", "head") if "." in field else ("verifier",):  # of counts a head has rules of its own
        edit_text_config(family / role, change)
        with pytest.raises(CheckpointError) as caught:
            load_config(family / role)
        assert str(family / role / "config.json") in caught.value.message
        assert field in caught.value.message and rule in caught.value.message


def test_tensors_of_a_head_that_no_module_reads_are_named(family):
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(family / "head", lambda tensors: tensors.update({bias: torch.ones(4)}))
    with pytest.raises(CheckpointError, match=f"does not have, first {bias}"):
        load_head(family / "head")


def test_two_spellings_of_one_tensor_are_not_left_to_chance(family):
    def change(tensors):
        tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"] + 1

    rewrite(family / "verifier", change)
    with pytest.raises(CheckpointError, match="are the same tensor"):
        load_verifier(family / "verifier")


def test_a_value_that_no_precision_holds_gets_no_advice_to_change_it(family):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double() * 1e300

    rewrite(family / "verifier", change)
    with pytest.raises(CheckpointError, match=r"not in torch\.float32") as caught:
        load_verifier(family / "verifier", "float32")
    assert "dtype" not in caught.value.hint


def test_a_model_without_shared_kv_is_not_a_verifier(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match=r"a 'gpt2' model does not hand K/V to a head"):
        handoff_layers(load_config(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "step"),
    [
        ("gemma3_text", "this one can be $.models.slm"),
        ("gemma4_vision", "the verifier is the Gemma 4 model that the head was published for"),
        ("llama", "the verifier must be a Gemma 4 model"),
    ],
)
def test_a_foreign_verifier_gets_its_next_step(tmp_path, model_type, step):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=f"a '{model_type}' model does not hand K/V to a head") as caught:
        handoff_layers(load_config(tmp_path))
    assert step in caught.value.hint


def test_a_model_type_that_transformers_does_not_know_gives_the_upgrade(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma9"}))
    with pytest.raises(CheckpointError, match=r"config of .* cannot be read") as caught:
        load_config(tmp_path)
    assert caught.value.hint == "pip install --upgrade transformers, or correct $.models"


def test_a_config_that_contradicts_itself_is_named_with_the_rule(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    with pytest.raises(CheckpointError, match="contradicts itself: hidden_size_per_layer_input must be 0, got 256"):
        load_config(tmp_path)


def quantised(folder, method):
    path = folder / "config.json"
    settings = {"quant_method": method, "bits": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return load_config(folder)


def test_a_quantised_verifier_serves_but_is_not_captured(family):
    require_full_precision(load_config(family / "verifier"))
    config = quantised(family / "verifier", "awq")
    check_family(config, load_config(family / "head"))
    with pytest.raises(CheckpointError, match=r"weights are quantised \(awq\), a capture demands BF16") as caught:
        require_full_precision(config)
    assert "$.models.allow_quantised_capture: true" in caught.value.hint


def test_a_quantised_checkpoint_names_the_library_that_reads_it(family):
    quantised(family / "verifier", "gptq")
    with pytest.raises(CheckpointError, match="verifier cannot be loaded") as caught:
        load_verifier(family / "verifier")
    assert caught.value.hint == "install what it names, or use the BF16 checkpoint"


PAPER_ATTENTION = {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512}


def test_hand_off_sizes_of_the_papers_verifier():
    pattern = ("SSSSSF" * 5)[:30]  # Gemma 4 26B-A4B
    config = builders.text_config(pattern, 262_144, 2816, num_attention_heads=16, **PAPER_ATTENTION)
    assert handoff_values(config) == (5632, 6144)
    assert handoff_layers(config) == {"sliding": 28, "full": 29}
    text = builders.text_config("SSSF", 262_144, 1024, vocab_size_per_layer_input=0, **PAPER_ATTENTION)
    check_family(config, Gemma4AssistantConfig(text_config=text, backbone_hidden_size=2816))


def test_the_last_storing_layers_feed_the_head():
    assert handoff_layers(builders.small_verifier(VOCAB, "SSFSSF").config) == {"sliding": 4, "full": 5}
    shared = builders.small_verifier(VOCAB, "SFSFSF", num_kv_shared_layers=2)
    assert handoff_layers(shared.config) == {"sliding": 2, "full": 3}
    assert kv_shapes(shared.config) == {"sliding": KvShape(2, 8), "full": KvShape(1, 16)}


def test_all_mismatches_are_named_at_once():
    head = builders.small_head(VOCAB + 1).config
    head.backbone_hidden_size = 99
    head.text_config.attention_bias = True
    slm = builders.text_config("SF", VOCAB + 2, 8)
    with pytest.raises(CheckpointError) as caught:
        check_family(builders.small_verifier(VOCAB).config, head, slm)
    for words in (
        "backbone width is 99, the verifier's hidden size is 16",
        "attention_bias is True, only False is implemented",
        "the head's vocabulary has 61 tokens, the verifier's 60",
        "the SLM's vocabulary has 62 tokens, the verifier's 60",
    ):
        assert words in caught.value.message
