"""The real-valued host: what each row may see, where it stands, and which ring slot its K/V go to."""

import numpy as np
import pytest

from hyco_export.core.network.host import SlmHost
from hyco_export.core.network.slm import SlmLayer, SlmNetwork

HIDDEN, ROWS = 4, 5
RINGS = {"sliding": 6, "full": 8}
SPANS = {"sliding": 4, "full": None}


def network() -> SlmNetwork:
    layers = (
        SlmLayer(0, "sliding", heads=1, kv_heads=1, dim=2, source=0, values_from_keys=False, scalar=1.0),
        SlmLayer(1, "full", heads=1, kv_heads=2, dim=4, source=1, values_from_keys=False, scalar=1.0),
        SlmLayer(2, "full", heads=1, kv_heads=2, dim=4, source=1, values_from_keys=False, scalar=1.0),
    )
    inv_freq = {"sliding": (1.0,), "full": (1.0, 0.0)}
    return SlmNetwork(HIDDEN, 2, 1e-6, None, RINGS, SPANS, inv_freq, layers)


class Rows:
    """Embedding rows that show their token."""

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        return np.repeat(ids[:, None], HIDDEN, axis=1).astype(np.float32)

    def per_layer(self, ids: np.ndarray) -> np.ndarray:
        return np.repeat(-ids[:, None], 6, axis=1).astype(np.float32)


def positions_as_kv(positions: list[int]) -> dict[str, np.ndarray]:
    """Outputs of a pass whose K/V rows hold their position."""
    rows = np.asarray(positions, np.float32)
    return {
        f"{kind}_new.{index}": np.broadcast_to(rows[None, :, None], (heads, len(rows), dim)).copy()
        for index, heads, dim in ((0, 1, 2), (1, 2, 4))
        for kind in ("k", "v")
    }


def host_with(length: int, start: int = 0) -> SlmHost:
    """A host whose rings hold K/V rows with their position as value."""
    host = SlmHost(network(), Rows(), ROWS, -100.0, start)
    while host.length < length:
        count = min(ROWS, length - host.length)
        host.commit(positions_as_kv(list(range(host.length, host.length + count))), range(count))
    return host


def seen_positions(feeds: dict[str, np.ndarray], layer_type: str, row: int) -> list[int]:
    """Positions in the ring that `row` sees, read from the K rows themselves."""
    ring = feeds["k.0" if layer_type == "sliding" else "k.1"][0, :, 0]
    visible = feeds[f"mask.{layer_type}"][row, : RINGS[layer_type]] == 0.0
    return sorted(int(position) for position in ring[visible])


@pytest.mark.parametrize("length", [0, 3, 5, 6, 7, 8, 9, 20])
def test_a_row_sees_the_newest_positions_of_the_rings(length: int) -> None:
    feeds = host_with(length).feeds([1, 2], [-1, 0])
    for row, position in ((0, length), (1, length + 1)):
        full = list(range(max(0, length - RINGS["full"]), length))
        sliding = [p for p in range(max(0, length - RINGS["sliding"]), length) if position - p < 4]
        assert seen_positions(feeds, "full", row) == full
        assert seen_positions(feeds, "sliding", row) == sliding


def test_rows_see_themselves_and_their_ancestors() -> None:
    feeds = host_with(3).feeds([1, 2, 3, 4], [-1, 0, 0, 2])
    own = feeds["mask.full"][:, RINGS["full"] :] == 0.0
    assert own.tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [True, False, True, True, False],
        [False, False, False, False, True],  # padding
    ]


def test_the_span_also_cuts_ancestors() -> None:
    feeds = host_with(0).feeds([1, 2, 3, 4, 5], [-1, 0, 1, 2, 3])
    own = feeds["mask.sliding"][:, RINGS["sliding"] :] == 0.0
    assert own[4].tolist() == [False, True, True, True, True]  # span 4 counts the row itself


def test_siblings_share_a_position() -> None:
    feeds = host_with(2).feeds([1, 2, 3], [-1, 0, 0])
    angles = np.array([2.0, 3.0, 3.0, 2.0, 2.0], np.float32)  # position x frequency 1; padding stands at the length
    assert np.allclose(feeds["cos.sliding"][:, 0], np.cos(angles))
    assert np.allclose(feeds["sin.sliding"][:, 0], -np.sin(angles))


def test_a_hidden_key_has_the_mask_value() -> None:
    mask = host_with(0).feeds([1], [-1])["mask.full"]
    assert set(np.unique(mask).tolist()) == {-100.0, 0.0}


def test_embeddings_are_those_of_the_tokens_and_padding() -> None:
    feeds = host_with(0).feeds([7, 9], [-1, 0])
    assert feeds["embeds"][:, 0].tolist() == [7, 9, 0, 0, 0]
    assert feeds["per_layer"].shape == (ROWS, 6)
    assert feeds["per_layer"][1, 0] == -9


def test_only_the_path_is_committed_in_its_order() -> None:
    host = host_with(7)
    host.commit(positions_as_kv([70, 71, 72, 73, 74]), [0, 2, 4])
    ring = host.feeds([1], [-1])["k.1"][0, :, 0]
    assert host.length == 10
    assert [int(ring[p % 8]) for p in (7, 8, 9)] == [70, 72, 74]
    assert [int(ring[p % 8]) for p in (2, 3, 4, 5, 6)] == [2, 3, 4, 5, 6]


def test_positions_before_the_start_do_not_exist() -> None:
    feeds = host_with(12, start=10).feeds([1], [-1])
    assert seen_positions(feeds, "full", 0) == [10, 11]
    assert np.allclose(feeds["cos.full"][0, 0], np.cos(np.float32(12.0)))
