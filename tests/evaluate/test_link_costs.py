"""The link that traces tell is the one that they were made over."""

import numpy as np
import pytest

from hyco_export.evaluate.link_costs import estimate_link, link_note, padding_cost, padding_note
from hyco_export.protocol.trace import GenerationTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.tree import EMPTY_TREE
from hyco_export.protocol.wire import Traffic

SERVER_MS = 7.0


def call(size: int, wait_ms: float, prime: bool) -> PrimeTrace | RoundTrace:
    traffic = Traffic(0, size, 0, size)
    if prime:
        return PrimeTrace(0.0, 4, 0, 5, "", wait_ms, 0.0, SERVER_MS, traffic)
    return RoundTrace(1, 0.0, 5, EMPTY_TREE, (), (), (3,), "", 0, 0.0, 0.0, 0.0, wait_ms, 0.0, SERVER_MS, traffic)


def trace(rtt_ms: float, mbit_s: float, noise_ms: float = 0.0) -> GenerationTrace:
    dice = np.random.default_rng(4)

    def wait_ms(size: int) -> float:
        return SERVER_MS + rtt_ms + size * 8 / (mbit_s * 1e3) + float(dice.uniform(-noise_ms, noise_ms))

    primes = tuple(call(6_000_000, wait_ms(6_000_000), prime=True) for _ in range(3))
    rounds = tuple(call(size, wait_ms(size), prime=False) for size in range(6_000, 60_000, 3_000))
    return GenerationTrace("s", "p", 0, 4, (5, 3), "length", 1.0, 1.0, primes, rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rtt_ms", "mbit_s"), [(70.0, 13.0), (22.0, 280.0)])
def test_round_trip_and_bandwidth_come_back(rtt_ms: float, mbit_s: float) -> None:
    exact = estimate_link([[trace(rtt_ms, mbit_s)]])
    assert (exact.rtt_ms, exact.down_mbit_s) == (pytest.approx(rtt_ms), pytest.approx(mbit_s))
    noisy = estimate_link([[trace(rtt_ms, mbit_s, noise_ms=2.0)]])
    assert (noisy.rtt_ms, noisy.down_mbit_s) == (pytest.approx(rtt_ms, abs=1.5), pytest.approx(mbit_s, rel=0.05))
    assert noisy.calls == 21


def test_replies_that_are_small_beside_the_jitter_tell_no_bandwidth() -> None:
    dice = np.random.default_rng(1)
    waits = SERVER_MS + 80.0 + dice.exponential(10.0, 300)
    rounds = tuple(call(int(dice.integers(4_000, 4_300)), float(wait), prime=False) for wait in waits)
    noise = GenerationTrace("s", "p", 0, 4, (5, 3), "length", 1.0, 1.0, (), rounds)  # type: ignore[arg-type]
    estimate = estimate_link([[noise]])
    assert np.isnan(estimate.down_mbit_s) and 80.0 < estimate.rtt_ms < 95.0


def test_replies_that_are_all_alike_tell_no_bandwidth() -> None:
    rounds = tuple(call(100, SERVER_MS + 3.0, prime=False) for _ in range(5))
    alike = GenerationTrace("s", "p", 0, 4, (5, 3), "length", 1.0, 1.0, (), rounds)  # type: ignore[arg-type]
    estimate = estimate_link([[alike]])
    assert estimate.rtt_ms == pytest.approx(3.0) and np.isnan(estimate.down_mbit_s)
    assert link_note([[alike]]) == "The link as 5 calls saw it: 3 ms round trip, too fast to tell."
    assert link_note([[trace(70.0, 13.0)]]).endswith("70 ms round trip, 13 Mbit/s down.")
    with pytest.raises(ValueError, match="no call"):
        estimate_link([])


# The cost of padding is the arithmetic of sizes.


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
