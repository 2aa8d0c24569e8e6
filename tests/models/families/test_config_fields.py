"""Every field of a config is honoured or refused by name; nothing that transformers adds goes by unseen."""

from dataclasses import fields
from typing import Any

import pytest
from transformers import Gemma3TextConfig, Gemma4AssistantConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.gemma4 import Gemma4TextConfig

from hyco_export.errors import CheckpointError
from hyco_export.models.families.checks import check_family
from hyco_export.models.families.config_fields import converted, require_honoured
from tests.support import builders
from tests.support.float_slm import gemma3_config
from tests.support.packed_slm import slm_config

VOCAB = 60
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("kind", [Gemma3TextConfig, Gemma4TextConfig, Gemma4AssistantConfig, Qwen3Config, LlamaConfig])
def test_every_field_that_transformers_has_is_judged(kind: type[Any]) -> None:
    honoured = converted()[kind.model_type]
    found = {field.name for field in fields(kind)}
    assert len(found) > 10
    assert found <= honoured.read | set(honoured.only)
    assert not honoured.read & set(honoured.only)


def gemma3(**given: Any) -> PreTrainedConfig:
    return gemma3_config("SSFSF", **given)


def gemma4(**given: Any) -> PreTrainedConfig:
    return slm_config(**given)


def head(**given: Any) -> PreTrainedConfig:
    config = builders.small_head(VOCAB).config
    for name, value in given.items():
        setattr(config, name, value)
    return config


def test_what_the_networks_compute_is_taken() -> None:
    stretched = {"full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0}, "sliding_attention": ROPE}
    require_honoured(gemma3(rope_parameters=stretched, final_logit_softcapping=30.0), "SLM")
    require_honoured(gemma4(), "SLM")
    require_honoured(head(), "head")
    require_honoured(head(use_ordered_embeddings=True), "head")
    notes = {"unsloth_fixed": True, "_sliding_window_pattern": 6, "cache_implementation": "hybrid", "later_field": None}
    require_honoured(gemma3(**notes), "SLM")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: gemma3(attention_bias=True), "attention_bias is True, only False is implemented"),
        (lambda: gemma3(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0, only None is implemented"),
        (lambda: gemma3(hidden_activation="silu"), "hidden_activation is 'silu', only 'gelu_pytorch_tanh'"),
        (lambda: gemma3(use_bidirectional_attention=True), "use_bidirectional_attention is True (its attention looks"),
        (lambda: gemma3(altup_num_inputs=4), "altup_num_inputs is 4, a field that transformers' Gemma3TextConfig does"),
        (lambda: gemma3(laurel_rank=64), "laurel_rank is 64, a field that"),
        (
            lambda: gemma3(rope_parameters={"full_attention": {**ROPE, "rope_type": "dynamic", "factor": 2.0}}),
            "rope_parameters.full_attention.rope_type is 'dynamic', not one of default, linear",
        ),
        (
            lambda: gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8),
            "enable_moe_block is True (it has mixture-of-experts blocks), only False",
        ),
        (lambda: gemma4(per_layer_config={0: {"sliding_window": 4}}), "per_layer_config.0.sliding_window is 4"),
    ],
)
def test_what_they_do_not_compute_is_refused_by_name_and_value(config: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        require_honoured(config(), "model")
    assert caught.value.message.startswith("the model cannot run as a static graph: ")
    assert words in caught.value.message
    assert caught.value.hint


def test_a_head_with_centroids_belongs_to_its_verifier() -> None:
    check_family(builders.small_verifier(VOCAB).config, head(use_ordered_embeddings=True))


def test_each_mismatch_has_its_own_next_step() -> None:
    verifier = builders.small_verifier(VOCAB).config
    with pytest.raises(CheckpointError) as caught:
        check_family(verifier, None, builders.text_config("SF", VOCAB + 2, 8))
    assert caught.value.hint.endswith("join both vocabularies by $.slm.bridge")
    with pytest.raises(CheckpointError) as caught:
        check_family(verifier, head(backbone_hidden_size=99))
    assert caught.value.hint == "use the head that was published for this verifier ($.models.head)"
    with pytest.raises(CheckpointError, match=r"the head's weights are quantised \(awq\)") as caught:
        check_family(verifier, head(quantization_config={"quant_method": "awq"}))
    assert caught.value.hint == "give its BF16 checkpoint"
