"""The cost of padding is the arithmetic of sizes."""

import pytest

from hyco_export.evaluate.link_costs import padding_cost, padding_note
from hyco_export.protocol.trace import RoundTrace
from hyco_export.protocol.tree import EMPTY_TREE
from hyco_export.protocol.wire import Traffic


def replies(*sizes: int) -> list[RoundTrace]:
    return [
        RoundTrace(1, 0.0, 5, EMPTY_TREE, (), (), (3,), "", 0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, Traffic(0, size, 0, size))
        for size in sizes
    ]


def test_bytes_and_sizes_are_counted() -> None:
    cost = padding_cost(replies(95, 96, 195, 10), 100)  # 5 B are the padding's own
    assert (cost.sizes, cost.plain_sizes) == (2, 4)
    assert cost.factor == pytest.approx((100 + 200 + 200 + 100) / (95 + 96 + 195 + 10))


def test_the_note_names_every_step() -> None:
    note = padding_note("hyco", replies(6_000, 12_000))
    assert "Replies of hyco have 2 different sizes" in note
    assert note.endswith(
        "padded to multiples of 4,096 B 1.14 times the bytes (sizes left: 2); "
        "of 16,384 B 1.82 times the bytes (sizes left: 1); of 65,536 B 7.28 times the bytes (sizes left: 1)."
    )
    with pytest.raises(ValueError, match="no round"):
        padding_cost([], 100)
