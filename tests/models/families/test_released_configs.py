"""Configs of released models have the sizes that their model cards and the paper give."""

import pytest

from hyco_export.errors import RecipeError
from hyco_export.models.families.checks import check_family
from hyco_export.models.families.released_configs import (
    FULL,
    KNOWN,
    SCALES,
    find_scale,
    head_config,
    known_config,
    small_config,
    verifier_config,
)
from hyco_export.models.verifier import handoff_values


def test_the_papers_verifier_hands_off_what_it_says() -> None:
    verifier = known_config("google/gemma-4-26B-A4B-it")
    head = known_config("google/gemma-4-26B-A4B-it-assistant")
    assert verifier is not None and head is not None
    assert handoff_values(verifier) == (5_632, 6_144)  # section 3.1
    assert (verifier.num_hidden_layers, verifier.num_experts, verifier.top_k_experts) == (30, 128, 8)
    check_family(verifier, head)
    assert handoff_values(verifier_config(FULL)) == (5_632, 6_144)


def test_e4b_and_its_head_have_each_others_sizes() -> None:
    verifier, head = known_config("google/gemma-4-E4B-it"), known_config("google/gemma-4-E4B-it-assistant")
    assert verifier is not None and head is not None
    assert head.backbone_hidden_size == verifier.hidden_size == 2_560
    assert verifier.num_hidden_layers == 42
    check_family(verifier, head)


def test_the_mobile_slm_is_packed_and_gemma_3_is_not() -> None:
    mobile = known_config("google/gemma-4-E2B-it-qat-mobile-transformers")
    gemma3 = known_config("gemma-3-270m-q4_k_m.gguf")
    assert mobile is not None and gemma3 is not None
    assert mobile.quantization_config["quant_method"] == "gemma" and mobile.num_hidden_layers == 35
    assert (gemma3.hidden_size, gemma3.num_hidden_layers, gemma3.vocab_size) == (640, 18, 262_144)
    assert getattr(gemma3, "quantization_config", None) is None


def test_other_names_are_not_known_and_every_call_gives_a_config_of_its_own() -> None:
    assert known_config("somebody/else") is None
    for name in KNOWN:
        first, second = known_config(name), known_config(name)
        assert first is not second and first.to_dict() == second.to_dict()


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_verifier_head_and_slm_of_a_scale_belong_together(scale) -> None:
    assert find_scale(scale.name) is scale
    check_family(verifier_config(scale), head_config(scale), small_config(scale.vocab_size))


def test_an_unknown_scale_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"--scale is 'huge' \(give one of: full, thin, middle, small\)"):
        find_scale("huge")
