"""What a verification pass takes by its rows, measured when a server starts: `ServerInfo.rows_ms`.

A device cuts its trees by it (`drafting.budget: auto`), and `plan` simulates with it. A pass is timed as the scheduler
times it, by the engine's clock, from the pass to what its logits say: one session, nobody beside it.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np

from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import RULES, Query
from hyco_export.protocol.tree import ROOT
from hyco_export.server.interfaces import Check, Clock, VerifierModels, VerifierSession

ROWS = (1, 5, 9, 17, 33, 65)  # of the root and trees of 0, 4 (Cloud+MTP), 8, 16, 32 (HyCo) and 64 nodes (the most)
REPEATS = 5  # passes of which the median counts, after one that warms up
SLICE_S = 0.25  # of wall time for the passes of one count, at most; two passes where those take longer
USUAL_CONTEXT = 256  # committed positions: a short prompt with half an answer
SEED = 20261011  # of the tokens: in a mixture of experts, equal ones would share their experts


class Asked(NamedTuple):
    """The passes that are timed: tokens below `vocab_size`, trees of `node_limit` nodes at most, `context` committed
    positions, judged under `sampling` by the epsilon rule."""

    vocab_size: int
    node_limit: int
    context: int
    sampling: wire.Sampling


def measure_rows(
    models: VerifierModels,
    open_session: Callable[[], VerifierSession],
    clock: Clock,
    asked: Asked,
    now: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Points (rows, ms) by increasing rows, up to the largest tree that is allowed. The session it needs is closed.

    Args:
        now: seconds, for the limit of the whole.
    """
    tokens = np.random.default_rng(SEED).integers(0, asked.vocab_size, asked.context + asked.node_limit)
    session = open_session()
    try:
        session.reserve(asked.context + 1)
        session.prime(tokens[: asked.context])
        rows = [count for count in ROWS if count <= asked.node_limit + 1]
        nodes = tokens[asked.context :]
        parts = [Check(session, 0, nodes[: count - 1], np.full(count - 1, ROOT)) for count in rows]
        return [(part.rows, _median_ms(models, clock, part, asked, now)) for part in parts]
    finally:
        session.close()


def _median_ms(models: VerifierModels, clock: Clock, part: Check, asked: Asked, now: Callable[[], float]) -> float:
    """Of warm passes of one part; where passes are slow, of the few that fit into its slice, at least one."""
    reads = RULES["epsilon"].reads
    tree = part.tokens.tolist(), part.parents.tolist()
    times: list[float] = []
    ends_s = now() + SLICE_S
    for _ in range(1 + REPEATS):
        mark = clock.start()
        (logits,) = models.forward([part])
        models.look([Query(logits, *tree, asked.context, asked.sampling, SEED, reads)])
        times.append(clock.elapsed_ms(mark))
        if len(times) > 1 and now() >= ends_s:
            break
    return median(times[1:])
