"""Captures hold exactly what a hand-off is made of, in every structure a verifier can have."""

import pytest
import torch
from transformers import GenerationConfig

from hyco_export.core.recipe import Sampling
from hyco_export.errors import ArtifactError, CheckpointError
from hyco_export.models.capture import greedy_answer, load_capture, sampled_answers, save_capture, teacher_forced
from hyco_export.models.head.unroll import final_norm, load_norm, save_norm
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.models.verifier import load_verifier
from tests.support import builders

VOCAB = 60
IDS = builders.random_ids(25, VOCAB)  # longer than the sliding window
STRUCTURES = {
    "k = v": ("SSFSF", {}),
    "own values": ("SSFSF", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "shared layers": ("SFSFSF", {"num_kv_shared_layers": 2}),
    "experts, as 26B-A4B": (
        "SSFSF",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_capture_is_what_the_layers_stored(name):
    pattern, fields = STRUCTURES[name]
    model = builders.small_verifier(VOCAB, pattern, **fields)
    with torch.no_grad():
        full = model.model(
            torch.tensor([IDS]), return_shared_kv_states=True, output_hidden_states=True, use_cache=False
        )

    capture = teacher_forced(model, IDS, 10)

    assert len(capture) == len(IDS)
    torch.testing.assert_close(capture.h, full.last_hidden_state[0])
    torch.testing.assert_close(capture.e, model.model.embed_tokens.weight[IDS] * builders.HIDDEN**0.5)
    for kind, attention in (("sliding", "sliding_attention"), ("full", "full_attention")):
        keys, values = full.shared_kv_states[attention]
        torch.testing.assert_close(capture.k[kind], keys[0].transpose(0, 1))
        torch.testing.assert_close(capture.v[kind], values[0].transpose(0, 1))
        assert not torch.equal(capture.k[kind], capture.v[kind])


def test_a_multimodal_checkpoint_is_captured_like_its_text_model(tmp_path):
    text = builders.small_verifier(VOCAB)
    model = load_verifier(builders.save_multimodal(tmp_path, text), "float32")
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    assert greedy_answer(model, IDS[:9], 12) == greedy_answer(text, IDS[:9], 12)
    for side in ("pre", "post"):
        found, wanted = teacher_forced(model, IDS, 10, side), teacher_forced(text, IDS, 10, side)
        for name, tensor in wanted.handoff_tensors().items():
            torch.testing.assert_close(found.handoff_tensors()[name], tensor)
    assert torch.equal(final_norm(model).weight, final_norm(text).weight)


def test_sizes_that_the_config_does_not_say_are_refused():
    model = builders.small_verifier(VOCAB)
    model.config.hidden_size += 1
    with pytest.raises(CheckpointError, match="hands out 32 values a round and 64 a token, its config says 34 and 64"):
        teacher_forced(model, IDS, 10)


def test_captures_that_nothing_can_be_learned_from_are_refused_with_their_cause():
    model = builders.small_verifier(VOCAB)
    model.model.norm.weight[3] = float("inf")  # as what overflows in a pass
    with pytest.raises(CheckpointError, match="the verifier's h is not finite at position 0") as caught:
        teacher_forced(model, IDS, 10)
    assert "float32" in caught.value.hint
    model.model.norm.weight.zero_()
    with pytest.raises(CheckpointError, match="hidden states are 0 at every position"):
        teacher_forced(model, IDS, 10)


def test_hidden_states_from_before_and_after_the_norm_belong_together():
    model = builders.small_verifier(VOCAB)
    before, after = (teacher_forced(model, IDS, 10, side).h for side in ("pre", "post"))
    torch.testing.assert_close(final_norm(model)(before), after)
    assert not torch.allclose(before, after)


def test_roots_draft_answer_tokens_and_have_a_hand_off():
    model = builders.small_verifier(VOCAB)
    assert list(teacher_forced(model, IDS[:8], 5).roots) == [4, 5, 6]
    assert list(teacher_forced(model, IDS[:4], 1).roots) == [1, 2]  # position 0 has nothing before it
    assert not teacher_forced(model, IDS[:5], 5).roots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_answers_equal_generate(dtype):
    model = builders.small_verifier(VOCAB).to(dtype)
    prompt = torch.tensor([IDS[:9]])
    wanted = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=30, eos_token_id=[1, 6], pad_token_id=0),
    )[0, 9:].tolist()
    assert greedy_answer(model, IDS[:9], 30) == wanted
    assert len(wanted) > builders.SLIDING_WINDOW


def test_an_answer_ends_with_its_stop_token():
    model = builders.small_verifier(VOCAB)
    long = greedy_answer(model, IDS[:9], 12)
    model.generation_config.eos_token_id = [long[4]]
    assert greedy_answer(model, IDS[:9], 12) == long[: long.index(long[4]) + 1]


def test_prompts_open_the_model_turn():
    tokenizer = builders.small_tokenizer()
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "Say it again, please."}])
    assert tokenizer.decode(ids) == "<bos><|turn>user\nSay it again, please.<turn|>\n<|turn>model\n"


def test_a_capture_survives_the_disk(tmp_path):
    capture = teacher_forced(builders.small_verifier(VOCAB), IDS, 10)
    size = save_capture(tmp_path / "one.safetensors", capture)
    found = load_capture(tmp_path / "one.safetensors")

    assert size == (tmp_path / "one.safetensors").stat().st_size
    assert found.answer_start == 10
    assert torch.equal(found.ids, capture.ids)
    for name, tensor in capture.handoff_tensors().items():
        assert torch.equal(found.handoff_tensors()[name], tensor)
    assert load_capture(tmp_path / "one.safetensors", torch.bfloat16).e.dtype == torch.bfloat16


def test_a_cut_capture_is_refused_by_name(tmp_path):
    path = tmp_path / "one.safetensors"
    save_capture(path, teacher_forced(builders.small_verifier(VOCAB), IDS, 10))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ArtifactError, match=r"one\.safetensors cannot be read"):
        load_capture(path)


def test_the_norm_survives_the_disk(tmp_path):
    norm = final_norm(builders.small_verifier(VOCAB))
    save_norm(tmp_path / "norm.safetensors", norm)
    found = load_norm(tmp_path / "norm.safetensors")
    assert found.epsilon == norm.epsilon == 1e-6
    assert torch.equal(found.weight, norm.weight)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_norm(tmp_path / "none.safetensors")


def test_sampled_answers_repeat_by_seed_and_end_at_a_stop():
    model = builders.small_verifier(VOCAB)
    model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    first = sampled_answers(model, IDS, 12, 3, Sampling(), seed=1)
    assert first == sampled_answers(model, IDS, 12, 3, Sampling(), seed=1)
    assert first != sampled_answers(model, IDS, 12, 3, Sampling(), seed=2)
    assert len(first) == 3
    for answer in first:
        assert 1 <= len(answer) <= 12
        assert not {7, 9} & set(answer[:-1])


def test_sampled_answers_stay_in_the_sampling_support():
    model = builders.small_verifier(VOCAB)
    model.generation_config = GenerationConfig(eos_token_id=[])
    only_best = Sampling(temperature=1.0, top_k=1)
    assert sampled_answers(model, IDS, 5, 2, only_best, seed=0) == [greedy_answer(model, IDS, 5)] * 2
