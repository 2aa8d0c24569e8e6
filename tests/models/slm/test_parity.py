"""The static SLM is transformers' model, through rings that wrap and over random trees; and the comparison can fail."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.tables import TABLES_FILE, HostTables, save_tables
from hyco_export.models.slm import parity
from hyco_export.models.slm.packed import PackedCheckpoint, stock_model
from hyco_export.models.slm.parity import (
    Scenario,
    comparison,
    output_of,
    relative_difference,
    scenarios,
    shortened,
    visibility,
)
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.slm.surgery import host_tables, slm_network, slm_weights
from hyco_export.models.torch_ops import TorchWeights
from tests.support.packed_slm import RINGS, ROWS, plain_config, random_ids, save_packed_slm, slm_config

KEPT = np.arange(1, 96, 2)
EMPTY_NETWORK = SlmNetwork(
    hidden=4, per_layer=0, epsilon=1e-6, soft_cap=None, rings={}, spans={}, inv_freq={}, layers=()
)
LIMIT = 1e-4  # float32 sums in another order; random weights amplify them


class Pairing:
    """A checkpoint as transformers' model and as the static network."""

    def __init__(self, folder: Path, rings: dict[str, int]) -> None:
        checkpoint = PackedCheckpoint(folder)
        self.stock = stock_model(folder)
        self.network = slm_network(checkpoint, rings)
        self.weights = TorchWeights(slm_weights(checkpoint, KEPT))
        save_tables(folder / TABLES_FILE, host_tables(checkpoint))
        self.tables = HostTables(folder / TABLES_FILE)

    def difference(self, case: Scenario, network: SlmNetwork | None = None) -> float:
        slm = FloatSlm(network or self.network, self.weights)
        window = self.stock.config.sliding_window
        return relative_difference(self.stock, slm, self.tables, KEPT, random_ids(60), ROWS, case, window)


PAIRINGS = {
    "like-e2b": (slm_config, RINGS),
    "rings-beyond-the-window": (slm_config, {"sliding": 14, "full": 10}),
    "values-from-keys": (plain_config, RINGS),
}


@pytest.fixture(scope="module", params=PAIRINGS)
def pairing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    config, rings = PAIRINGS[request.param]
    return Pairing(save_packed_slm(tmp_path_factory.mktemp("slm"), config()), rings)


@pytest.mark.parametrize("case", scenarios(RINGS, ROWS), ids=lambda case: case.name)
def test_static_pass_equals_transformers(pairing: Pairing, case: Scenario) -> None:
    assert pairing.difference(case) < LIMIT


def test_scenarios_cover_what_they_claim() -> None:
    plain, wrapped, tree, tree_wrapped = scenarios(RINGS, ROWS)
    assert plain.context < min(RINGS.values())
    assert wrapped.context > 2 * max(RINGS.values())
    assert wrapped.context % ROWS  # the last pass has padding rows
    assert tree.parents == tree_wrapped.parents
    assert len(set(tree.parents)) < len(tree.parents)  # somebody has siblings


def test_a_large_model_is_compared_over_short_rings(pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    slm = FloatSlm(pairing.network, pairing.weights)
    whole = comparison(pairing.stock, slm, ROWS)
    assert (len(whole.cases), whole.window, whole.slm) == (4, 8, slm)
    monkeypatch.setattr(parity, "SHORTENED_VALUES", slm.value_count - 1)
    monkeypatch.setattr(parity, "SHORTENED_PASSES", 1)
    short, window, cases = comparison(pairing.stock, slm, ROWS)
    assert [case.name for case in cases] == ["tree", "tree_wrapped"]
    assert max(short.network.rings.values()) == window == ROWS
    for case in cases:
        ids = random_ids(60)
        assert relative_difference(pairing.stock, short, pairing.tables, KEPT, ids, ROWS, case, window) < LIMIT
    wrong = slm.over(msgspec.structs.replace(slm.network, spans={"sliding": 7, "full": None}))
    with pytest.raises(ValueError, match="the static network's window is 7, the model's 8"):
        comparison(pairing.stock, wrong, ROWS)


def test_rings_are_shortened_in_proportion() -> None:
    network = msgspec.structs.replace(
        EMPTY_NETWORK, rings={"full": 1024, "sliding": 512}, spans={"full": None, "sliding": 512}
    )
    short = shortened(network, 32)
    assert (short.rings, short.spans) == ({"full": 64, "sliding": 32}, {"full": None, "sliding": 32})


def test_only_the_kept_rows_of_the_output_layer_are_computed(pairing: Pairing) -> None:
    ids = torch.tensor([random_ids(5)])
    with torch.no_grad():
        whole = pairing.stock(ids).logits
        with output_of(pairing.stock, KEPT):
            part = pairing.stock(ids).logits
        assert torch.allclose(part, whole[..., KEPT], atol=1e-5)
        assert torch.equal(pairing.stock(ids).logits, whole)


def change_layer(network: SlmNetwork, index: int, **fields: object) -> SlmNetwork:
    layers = list(network.layers)
    layers[index] = msgspec.structs.replace(layers[index], **fields)
    return msgspec.structs.replace(network, layers=tuple(layers))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda network: msgspec.structs.replace(network, spans={"sliding": 7, "full": None}),
        lambda network: msgspec.structs.replace(network, epsilon=1e-2),
        lambda network: msgspec.structs.replace(network, inv_freq={k: v[::-1] for k, v in network.inv_freq.items()}),
        lambda network: change_layer(network, 0, scalar=1.0),
    ],
    ids=["span off by one", "epsilon", "rotary frequencies", "layer scalar"],
)
def test_a_wrong_network_is_seen(pairing: Pairing, wrong: Callable[[SlmNetwork], SlmNetwork]) -> None:
    assert pairing.difference(scenarios(RINGS, ROWS)[1], wrong(pairing.network)) > 1e-3


def test_visibility_is_the_ring_and_the_own_pass() -> None:
    case = Scenario("small", 7, (-1, 0, 0))
    seen = visibility(case, rows=3, ring=4)
    assert np.flatnonzero(seen[5]).tolist() == [0, 1, 2, 3, 4, 5]  # pass 3..5; the ring holds 0..2
    assert np.flatnonzero(seen[6]).tolist() == [2, 3, 4, 5, 6]  # pass 6..; the ring holds 2..5
    assert np.flatnonzero(seen[9]).tolist() == [3, 4, 5, 6, 7, 9]  # node 2: ring 3..6, its parent, itself
