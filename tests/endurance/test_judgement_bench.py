"""The two ways that the benchmark of the judgement compares find the same."""

import pytest
import torch

from tests.endurance import judgement_bench as bench


@pytest.mark.parametrize("sampling", [bench.PAPER, bench.GREEDY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_judge_alike(sampling: bench.Sampling, dtype: torch.dtype) -> None:
    query = bench.random_query(5, 9_000, sampling, dtype)
    host, device = bench.on_host(query), bench.on_device(query)
    assert host.draws == device.draws and host.probs.tobytes() == device.probs.tobytes()
    assert len(set(host.draws)) > 1
    assert bench.cpu_ms(bench.on_device, query) > 0
