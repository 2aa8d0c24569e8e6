"""Rounds read off a text, chains against transformers' own forward, and the numbers of the committed family."""

import json
from pathlib import Path

import pytest
import torch

from hyco_export.core.files import CHECKPOINTS
from hyco_export.dev.tiny.card import ChainResult, answer_rounds, load_family, measure_chain, measure_slm_agreement
from hyco_export.dev.tiny.chain import ChainContext, drafted_tokens, sampled_rows, teacher_forced_states, verifier_pass
from hyco_export.dev.tiny.configs import CHAIN_LENGTH, SLIDING_WINDOW
from hyco_export.dev.tiny.training import Row, prompt_ids

VALIDATION = Path(__file__).parents[3] / "calibration_data" / "validation.jsonl"

MIN_MAT, MIN_ACCEPTANCE, MAX_SPREAD, MIN_SLM_AGREEMENT = 1.9, 0.5, 0.15, 0.35
"""The family's acceptance criteria."""

SAMPLING_SLACK = 0.05
"""Shares measured on 20 prompts (about 800 rounds) scatter by two standard errors of this size at depth 1."""


@pytest.fixture(scope="module")
def family():
    return load_family(CHECKPOINTS)


@pytest.fixture(scope="module")
def rows(family, tokenizer):
    lines = VALIDATION.read_text(encoding="utf-8").splitlines()[::3]
    prompts = [prompt_ids(json.loads(line)["messages"], tokenizer) for line in lines]
    return sampled_rows(family[0], prompts, seed=11, report=lambda _share: None)


def test_rounds_of_a_text():
    # prompt 0 1, answer 10..17; chains[t] is drafted behind the root at t+1
    row = Row((0, 1, 10, 11, 12, 13, 14, 15, 16, 17), 2)
    right = {root: list(range(9 + root, 13 + root)) for root in range(1, 10)}
    chains = [right[root] for root in range(1, 10)]
    assert list(answer_rounds(row, chains)) == [(4, 5), (2, 2)]
    chains[1] = [11, 99, 13, 14]
    assert list(answer_rounds(row, chains)) == [(1, 2), (4, 5)]
    assert list(answer_rounds(row, [[99] * CHAIN_LENGTH] * 9)) == [(0, 1)] * 7


def test_shares_by_depth():
    result = ChainResult(accepted=(0, 1, 2, 4), committed=11)
    assert result.by_depth == [3 / 4, 2 / 3, 1 / 2, 1]
    assert result.mean_accepted_tokens == 11 / 4


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


def test_drafts_equal_taught_drafts_where_the_text_agrees(family):
    verifier, head, _ = family
    ids = torch.randint(7, 2048, (1, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        context = ChainContext(head, verifier_pass(verifier, ids))
        first = head.lm_head(next(teacher_forced_states(context, ids))).argmax(-1)
        assert torch.equal(drafted_tokens(context, ids)[..., 0], first)


def test_chain_reaches_the_criteria(family, rows):
    result = measure_chain(family[0], family[1], rows)
    assert result.mean_accepted_tokens >= MIN_MAT
    assert min(result.by_depth) >= MIN_ACCEPTANCE - SAMPLING_SLACK
    assert max(result.by_depth) - min(result.by_depth) <= MAX_SPREAD + 2 * SAMPLING_SLACK


def test_slm_reaches_its_criterion(family, rows):
    assert measure_slm_agreement(family[0], family[2], rows) >= MIN_SLM_AGREEMENT
