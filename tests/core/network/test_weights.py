"""The table of products: the same drafts from smaller rows, with nothing lost but one rounding to 8 bits."""

import msgspec
import numpy as np
import pytest

from hyco_export.core.network.head import EMBEDDING_HALF, PROJECTED_TABLE, STATE_HALF, TABLE, HeadNetwork, build
from hyco_export.core.network.weights import Weights, project_table
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qdq_ops import QdqOps
from tests.support.random_head import SMALL, calibrate, random_head, random_table

PLAIN = HeadNetwork(SMALL.architecture(), steps=4, runner_up_steps=2, window=16, hidden_norm="post", final_epsilon=1e-6)
PROJECTED = msgspec.structs.replace(PLAIN, projected_table=True)
ROOTS = 12


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_head(SMALL).device_weights(np.arange(SMALL.kept), random_table(SMALL), None)


def test_rows_are_the_embeddings_times_their_half(weights: Weights) -> None:
    projected = project_table(weights)
    rows = np.arange(SMALL.kept)
    whole = weights.matrices["pre_projection"].real()
    exact = weights.tables[TABLE].real(rows) @ whole[:, : SMALL.backbone].T
    found = projected.weights.tables[PROJECTED_TABLE].real(rows)
    assert np.abs(found - exact).max() <= 0.51 * (np.abs(exact).max(axis=1) / 127).max()
    noise = np.sum((found - exact) ** 2)
    assert projected.sqnr_db == pytest.approx(10 * np.log10(np.sum(exact**2) / noise), abs=0.01)
    assert projected.sqnr_db > 40
    halves = [projected.weights.matrices[name].real() for name in (EMBEDDING_HALF, STATE_HALF)]
    assert np.array_equal(np.concatenate(halves, axis=1), whole)
    assert not {"pre_projection", TABLE} & (set(projected.weights.matrices) | set(projected.weights.tables))


def test_chunks_make_no_difference(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = project_table(weights).weights.tables[PROJECTED_TABLE]
    monkeypatch.setattr("hyco_export.core.network.weights.CHUNK_ROWS", 7)
    parts = project_table(weights).weights.tables[PROJECTED_TABLE]
    assert np.mean(parts.integers != whole.integers) < 0.001  # matrices of other sizes are summed in another order
    np.testing.assert_allclose(parts.scales, whole.scales, rtol=1e-5)


def test_float_and_integer_heads_draft_like_the_plain_ones(weights: Weights) -> None:
    plain = calibrate(PLAIN, weights, SMALL, ROOTS)
    projected = calibrate(PROJECTED, project_table(weights).weights, SMALL, ROOTS)
    ops = QdqOps("head", projected.weights, projected.encodings)
    build(ops, PROJECTED)
    assert lint(ops.model()) == []
    session = ReferenceSession(ops.model().SerializeToString())
    floats, integers = [], []
    for real, feeds in zip(plain.real_feeds, projected.feeds(ops), strict=True):
        wanted = plain.float_head.draft(real)["chain"].ravel()
        floats.append(projected.float_head.draft(real)["chain"].ravel() == wanted)
        integers.append(session.run(feeds)["chain"] == wanted)
    assert np.mean(floats) >= 0.9 and np.mean(integers) >= 0.9
    assert np.all(np.array(floats)[:, 0])  # the first step looks nothing up
