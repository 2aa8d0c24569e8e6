"""Chains against transformers' own forward pass, masks, sampled answers, and the truncated distribution."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hyco_export.dev.tiny import chain
from hyco_export.dev.tiny.chain import (
    TOP_K,
    TOP_P,
    ChainContext,
    drafted_tokens,
    head_masks,
    sampled_rows,
    teacher_forced_states,
    truncated_distribution,
    verifier_pass,
)
from hyco_export.dev.tiny.configs import CHAIN_LENGTH, SLIDING_WINDOW, STOP_IDS


@pytest.mark.parametrize("position", [3, SLIDING_WINDOW, SLIDING_WINDOW + 1, SLIDING_WINDOW + 30])
def test_chain_equals_transformers_assistant(family, position):
    """One query through `Gemma4AssistantForCausalLM.forward`, as transformers' assisted generation calls it."""
    verifier, head, _ = family
    ids = torch.randint(7, 2048, (1, SLIDING_WINDOW + 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        chains = drafted_tokens(ChainContext(head, verifier_pass(verifier, ids)), ids)
        seen = verifier_pass(verifier, ids[:, : position + 1])
        token, state, wanted = ids[:, position + 1 : position + 2], seen.states[:, -1:], []
        for _ in range(CHAIN_LENGTH):
            output = head(
                inputs_embeds=torch.cat([verifier.get_input_embeddings()(token), state], dim=-1),
                position_ids=torch.tensor([[position + 1]]),
                shared_kv_states=seen.kv,
                output_hidden_states=[-1],
            )
            token, state = output.logits.argmax(-1), output.last_hidden_state
            wanted.append(token.item())
    assert chains[0, position].tolist() == wanted


def test_drafts_equal_teacher_forced_drafts_where_the_text_agrees(family):
    verifier, head, _ = family
    ids = torch.randint(7, 2048, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        context = ChainContext(head, verifier_pass(verifier, ids))
        first = head.lm_head(next(teacher_forced_states(context, ids))).argmax(-1)
        assert torch.equal(drafted_tokens(context, ids)[..., 0], first)


def test_a_pass_gives_the_models_own_logits(family):
    verifier = family[0]
    ids = torch.randint(7, 2048, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(verifier_pass(verifier, ids).logits(), verifier(input_ids=ids).logits)


def test_a_sliding_layer_sees_one_key_more_than_its_window():
    masks = head_masks(SLIDING_WINDOW + 10)
    for query in (0, 5, SLIDING_WINDOW + 9):
        seen = {name: (mask[0, 0, query] == 0).nonzero()[:, 0].tolist() for name, mask in masks.items()}
        assert seen["full_attention"] == list(range(query + 1))
        assert seen["sliding_attention"] == list(range(max(0, query - SLIDING_WINDOW), query + 1))


def test_answers_follow_their_prompts_and_end_with_a_stop_or_at_the_limit(family, monkeypatch):
    monkeypatch.setattr(chain, "GENERATION_BATCH", 2)
    monkeypatch.setattr(chain, "MAX_ANSWER_TOKENS", 6)
    prompts = [[2, 300, 301, 302, 303], [2, 40], [2, 900, 901]]
    shares: list[float] = []
    rows = sampled_rows(family[0], prompts, seed=1, report=shares.append)
    for row, prompt in zip(rows, prompts, strict=True):
        assert list(row.ids[: row.answer_start]) == prompt
        answer = row.ids[row.answer_start :]
        assert 0 < len(answer) <= 6 and not set(answer[:-1]) & set(STOP_IDS)
        assert len(answer) == 6 or answer[-1] in STOP_IDS
    assert shares == [pytest.approx(2 / 3), 1.0]
    assert sampled_rows(family[0], prompts, seed=1, report=shares.append) == rows


def test_truncated_distribution_equals_the_warpers():
    logits = 4 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    warped = TopPLogitsWarper(TOP_P)(None, TopKLogitsWarper(TOP_K)(None, logits))
    targets = truncated_distribution(logits)
    dense = torch.zeros_like(logits).scatter_(1, targets.ids, targets.probs)
    torch.testing.assert_close(dense, warped.softmax(-1))
