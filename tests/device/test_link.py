"""The link's arithmetic and its dice: exact without chance, right on average with it, the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.device.link import PACKET_BYTES, PRESETS, Link, LinkDice, find_link
from hyco_export.errors import HycoError

QUIET = Link("quiet", rtt_ms=40.0, jitter_ms=0.0, down_mbit_s=8.0, up_mbit_s=4.0)


def test_without_chance_a_direction_is_half_the_round_trip_and_its_bytes() -> None:
    dice = LinkDice(QUIET, 0)
    assert dice.down_ms(10_000) == pytest.approx(20.0 + 10.0)  # 80,000 bits at 8 Mbit/s
    assert dice.up_ms(10_000) == pytest.approx(20.0 + 20.0)
    assert not dice.breaks() and dice.outage_over_s(1e9) == 1e9


def test_jitter_and_loss_have_the_stated_means() -> None:
    link = Link("noisy", rtt_ms=40.0, jitter_ms=5.0, down_mbit_s=1e9, up_mbit_s=1e9)
    late = np.array([LinkDice(link, seed).down_ms(0) for seed in range(4000)]) - 20.0
    assert late.min() >= 0.0 and late.mean() == pytest.approx(5.0, rel=0.1)
    lossy = LinkDice(Link("lossy", 40.0, 0.0, 1e9, 1e9, loss=0.1), 3)
    one_packet = np.array([lossy.down_ms(PACKET_BYTES) for _ in range(4000)])
    assert set(np.round(one_packet - 20.0, 3)) >= {0.0, 40.0, 80.0}  # whole round trips
    assert (one_packet - 20.0).mean() == pytest.approx(40.0 * (0.1 / 0.9), rel=0.15)  # geometric
    many = np.mean([lossy.down_ms(1000 * PACKET_BYTES) for _ in range(200)])
    assert many > one_packet.mean() + 40.0  # a large reply is hit more often


def test_outages_come_and_last_as_stated() -> None:
    dice = LinkDice(Link("tunnel", 0.0, 0.0, 1.0, 1.0, outages_per_min=6.0, outage_s=2.0), 1)
    step_s, over = 0.01, 0
    for step in range(int(600 / step_s)):
        now_s = step * step_s
        end_s = dice.outage_over_s(now_s)
        assert now_s <= end_s <= now_s + 2.0 + 1e-9
        over += end_s > now_s
    assert over * step_s / 600 == pytest.approx(2.0 / (10.0 + 2.0), rel=0.35)  # 2 s of every 12


def test_resets_split_between_both_directions() -> None:
    dice = LinkDice(Link("resets", 0.0, 0.0, 1.0, 1.0, resets=0.2), 1)
    assert np.mean([dice.breaks() for _ in range(5000)]) == pytest.approx(0.1, rel=0.15)


@given(st.integers(0, 1 << 40), st.sampled_from(list(PRESETS)), st.lists(st.integers(0, 1 << 22), max_size=20))
def test_the_same_seed_is_the_same_link(seed: int, name: str, sizes: list[int]) -> None:
    left, right = LinkDice(find_link(name), seed), LinkDice(find_link(name), seed)
    assert [left.down_ms(size) for size in sizes] == [right.down_ms(size) for size in sizes]


def test_presets_are_ordered_as_networks_are() -> None:
    assert list(PRESETS) == ["lte", "5g-nsa", "wifi"]
    lte, nsa, _ = PRESETS.values()
    assert lte.rtt_ms > nsa.rtt_ms and lte.down_mbit_s < nsa.down_mbit_s and lte.up_mbit_s < lte.down_mbit_s
    with pytest.raises(HycoError, match=r"unknown link 'isdn' \(known ones: lte, 5g-nsa, wifi\)"):
        find_link("isdn")


@pytest.mark.parametrize(
    ("field", "value"), [("rtt_ms", -1.0), ("down_mbit_s", 0.0), ("loss", 1.0), ("resets", -0.1), ("outage_s", -1.0)]
)
def test_impossible_links_are_refused_by_field(field: str, value: float) -> None:
    fields = {"rtt_ms": 1.0, "jitter_ms": 1.0, "down_mbit_s": 1.0, "up_mbit_s": 1.0, field: value}
    with pytest.raises(HycoError, match=f"link x: {field} is {value}"):
        Link("x", **fields)
