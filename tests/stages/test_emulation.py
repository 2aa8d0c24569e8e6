"""The emulator's budget: what a run costs, and how many feeds that leaves."""

import numpy as np
import pytest

from hyco_export.stages import compile
from hyco_export.stages.compile import affordable_feeds, linear_work
from tests.support.qdq_builder import QdqBuilder, random_linear, two_layer_mlp
from tests.support.slm_parts import slm_parts


@pytest.mark.parametrize(("rows", "tiles"), [(1, 1), (32, 1), (33, 2), (128, 4)])
def test_work_is_weights_by_tiles_of_rows(rows: int, tiles: int) -> None:
    assert linear_work(two_layer_mlp(rows).model()) == 2 * 32 * 48 * tiles


def test_a_layer_that_runs_twice_counts_twice() -> None:
    builder = QdqBuilder()
    weight = builder.weight("w", *random_linear(np.random.default_rng(0), 32, 32), axis=0)
    x = builder.input("x", (4, 32), -4, 4)
    for name in ("once", "twice"):
        real = builder.node("Gemm", [builder.real(x), weight], [f"{name}_out"], transB=1)
        x = builder.quantize(real, name, (4, 32), -4, 4)
    builder.output(x)
    assert linear_work(builder.model()) == 2 * 32 * 32


def test_products_of_activations_cost_nothing_here() -> None:
    parts = slm_parts()
    sizes = [matrix.integers.size for matrix in parts.weights.integer_matrices().values()]
    assert linear_work(parts.tree_model) == sum(sizes)


def test_large_graphs_get_fewer_feeds_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layer_mlp().model()
    assert affordable_feeds(model, 16) == 16
    assert affordable_feeds(model, 0) == 0
    monkeypatch.setattr(compile, "WEIGHTS_PER_S", 2 * 32 * 48)
    monkeypatch.setattr(compile, "BUDGET_S", 3)
    assert affordable_feeds(model, 16) == 3
    monkeypatch.setattr(compile, "BUDGET_S", 0)
    assert affordable_feeds(model, 16) == 1
