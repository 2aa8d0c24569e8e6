"""What the host feeds: the right rows in the right slots, and masks that end where they must."""

import numpy as np
import pytest

from hyco_export.core.encodings import encoding_from_range
from hyco_export.core.handoff import KvShape
from hyco_export.core.network.head import HeadArchitecture, HeadLayer, HeadNetwork
from hyco_export.core.network.host import draft_feeds, on_grid, shared_positions
from hyco_export.core.ring import EMPTY, ring_span, slot_positions

WINDOW, SPAN, LENGTH, MASK = 6, 4, 20, -100.0
NETWORK = HeadNetwork(
    HeadArchitecture(
        backbone=3,
        width=4,
        vocab_size=10,
        epsilon=1e-6,
        layers=(HeadLayer("sliding", 2, KvShape(2, 2), 1.0), HeadLayer("full", 2, KvShape(1, 4), 1.0)),
        spans={"sliding": SPAN, "full": None},
        inv_freq={"sliding": (1.0,), "full": (1.0, 0.0)},
    ),
    steps=2,
    runner_up_steps=1,
    window=WINDOW,
    hidden_norm="post",
    final_epsilon=1e-6,
)


@pytest.fixture
def sequence():
    """Values that name their position: row p holds p + 1."""
    rows = np.arange(1, LENGTH + 1, dtype=np.float32)
    shapes = {"e": (3,), "h": (3,), "k.sliding": (2, 2), "v.sliding": (2, 2), "k.full": (1, 4), "v.full": (1, 4)}
    return {name: np.tile(rows.reshape(-1, *[1] * len(shape)), (1, *shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("root", [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, LENGTH - 1])
def test_a_ring_feed_shows_just_the_newest_positions(sequence, root):
    feeds = draft_feeds(NETWORK, sequence, np.array([root]), slot_positions(root, WINDOW), MASK)

    assert feeds["e"][0, 0] == root + 1
    assert feeds["h"][0, 0] == root  # of the position before the root
    for name, shown in (("full", WINDOW), ("sliding", SPAN - 1)):
        held = feeds[f"k.{name}"][0, :, 0] - 1  # position in each slot, -1 where empty
        visible = held[feeds[f"mask.{name}"][0] == 0.0]
        np.testing.assert_array_equal(np.sort(visible), np.arange(max(0, root - shown), root))
        assert set(np.unique(feeds[f"mask.{name}"])) <= {0.0, np.float32(MASK)}
    for position in range(max(0, root - WINDOW), root):
        assert feeds["v.full"][0, position % WINDOW, 0] == position + 1


def test_roots_that_share_keys_each_see_their_own_window(sequence):
    roots = np.array([8, 9, 10])
    keys = shared_positions(roots, WINDOW)
    feeds = draft_feeds(NETWORK, sequence, roots, keys, MASK)

    assert len(keys) == WINDOW + 2
    for row, root in enumerate(roots):
        alone = draft_feeds(NETWORK, sequence, np.array([root]), slot_positions(root, WINDOW), MASK)
        for name in ("full", "sliding"):
            together = keys[feeds[f"mask.{name}"][row] == 0.0]
            single = slot_positions(root, WINDOW)[alone[f"mask.{name}"][0] == 0.0]
            np.testing.assert_array_equal(np.sort(together), np.sort(single))
            np.testing.assert_array_equal(feeds[f"cos.{name}"][row], alone[f"cos.{name}"][0])


def test_positions_before_the_sequence_are_empty():
    assert shared_positions(np.array([2, 3]), WINDOW).tolist() == [EMPTY] * 4 + [0, 1, 2]


def test_values_arrive_on_their_grid():
    grids = {"e": encoding_from_range(-1.0, 1.55, "uint8")}
    arrived = on_grid({"e": np.array([[0.503, 9.0]], np.float32)}, grids)["e"]
    np.testing.assert_allclose(arrived, [[0.5, 1.55]], atol=1e-6)


def test_a_ring_never_shows_more_than_it_holds():
    assert ring_span(None, 6) == 7
    assert ring_span(4, 6) == 4
    assert ring_span(100, 6) == 7
