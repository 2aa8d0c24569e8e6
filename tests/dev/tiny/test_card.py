"""Rounds read off a text, and the numbers of the committed family."""

import json
from pathlib import Path

import pytest

from hyco_export.dev.tiny.card import ChainResult, answer_rounds, measure_chain, measure_slm_agreement
from hyco_export.dev.tiny.chain import sampled_rows
from hyco_export.dev.tiny.configs import CHAIN_LENGTH
from hyco_export.dev.tiny.training import Row, prompt_ids

VALIDATION = Path(__file__).parents[3] / "calibration_data" / "validation.jsonl"

MIN_MAT, MIN_ACCEPTANCE, MAX_SPREAD, MIN_SLM_AGREEMENT = 1.9, 0.5, 0.15, 0.35
"""The family's acceptance criteria."""

SAMPLING_SLACK = 0.05
"""Shares measured on 20 prompts (about 800 rounds) scatter by two standard errors of this size at depth 1."""


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


def test_chain_reaches_the_criteria(family, rows):
    result = measure_chain(family[0], family[1], rows)
    assert result.mean_accepted_tokens >= MIN_MAT
    assert min(result.by_depth) >= MIN_ACCEPTANCE - SAMPLING_SLACK
    assert max(result.by_depth) - min(result.by_depth) <= MAX_SPREAD + 2 * SAMPLING_SLACK


def test_slm_reaches_its_criterion(family, rows):
    assert measure_slm_agreement(family[0], family[2], rows) >= MIN_SLM_AGREEMENT
