"""A round's judgement at a real vocabulary, from the output layer's logits to draws and p~.

`server.passes.judgement` takes turns with the way by the host: soft-cap over all logits, then
`protocol.acceptance.look` in numpy. Run: `make judgement-bench`. Times are this thread's CPU time, so that other
processes disturb them less.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from hyco_export.core.numerics import MS_PER_S
from hyco_export.protocol import acceptance
from hyco_export.protocol.acceptance import PROBS, Judged, Query
from hyco_export.protocol.tree import ROOT
from hyco_export.protocol.wire import Sampling
from hyco_export.server.passes.judgement import PassLogits, look

COLUMNS, CAP = 262_144, 30.0  # Gemma 4's
PAPER, GREEDY = Sampling(1.0, 64, 0.95), Sampling(0.0, 0, 1.0)
REPEATS = 9


def random_query(rows: int, columns: int, sampling: Sampling, dtype: torch.dtype) -> Query:
    """Logits of a chain, whose nodes are second choices."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)) * 6
    tokens = drawn[:-1].topk(2, dim=1).indices[:, 1].tolist()
    parents = list(range(ROOT, ROOT + rows - 1))
    return Query(PassLogits(drawn.to(dtype), CAP, 0, rows), tokens, parents, 99, sampling, 3, frozenset({PROBS}))


def on_host(query: Query) -> Judged:
    """All logits soft-capped and brought to numpy."""
    return acceptance.look(query._replace(logits=query.logits.numpy()))


def on_device(query: Query) -> Judged:
    (judged,) = look([query])
    assert isinstance(judged, Judged)
    return judged


def cpu_ms(judge: Callable[[Query], Judged], query: Query) -> float:
    started = time.thread_time()
    judge(query)
    return (time.thread_time() - started) * MS_PER_S


def main() -> None:
    torch.set_num_threads(1)
    print(f"{COLUMNS:,} columns, one thread, medians of {REPEATS} rounds each, ms")
    for dtype in (torch.float32, torch.bfloat16):
        for name, sampling in (("sampled", PAPER), ("greedy", GREEDY)):
            for rows in (33, 5):
                query = random_query(rows, COLUMNS, sampling, dtype)
                on_host(query), on_device(query)
                pairs = [(cpu_ms(on_host, query), cpu_ms(on_device, query)) for _ in range(REPEATS)]
                host_ms, device_ms = np.median(pairs, axis=0)
                kind = f"{str(dtype).removeprefix('torch.')}, {name}, {rows} rows"
                print(f"{kind:28} by the host {host_ms:6.1f}   where they are {device_ms:5.1f}")


if __name__ == "__main__":
    main()
