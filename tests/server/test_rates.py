"""The bucket of calls: steady rate, burst, callers apart, bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.errors import ProtocolError
from hyco_export.server.access import CALLERS_KEPT, RateLimiter


class Now:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def taken(limiter: RateLimiter, caller: str, calls: int) -> int:
    count = 0
    for _ in range(calls):
        try:
            limiter.take(caller)
            count += 1
        except ProtocolError:
            pass
    return count


def test_a_burst_then_the_rate_and_the_wait_is_right() -> None:
    now = Now()
    limiter = RateLimiter(2.0, 5, now)
    assert taken(limiter, "a", 9) == 5
    with pytest.raises(ProtocolError, match=r"more than 2 calls a second, 5 at once") as refusal:
        limiter.take("a")
    assert refusal.value.wait_s == pytest.approx(0.5)
    now.s += refusal.value.wait_s
    assert taken(limiter, "a", 3) == 1
    now.s += 100.0
    assert taken(limiter, "a", 9) == 5  # what was not used does not pile up


def test_callers_do_not_share() -> None:
    limiter = RateLimiter(1.0, 2, Now())
    assert taken(limiter, "a", 5) == taken(limiter, "b", 5) == 2


@given(st.lists(st.floats(0.0, 3.0), max_size=60), st.integers(1, 9), st.floats(0.1, 20.0))
def test_no_history_gets_more_than_rate_and_burst_allow(pauses_s: list[float], burst: int, per_s: float) -> None:
    now = Now()
    limiter = RateLimiter(per_s, burst, now)
    total = 0
    for pause_s in pauses_s:
        now.s += pause_s
        total += taken(limiter, "a", 3)
    assert total <= burst + per_s * sum(pauses_s) + 1e-6


def test_memory_is_bounded_however_many_callers_come() -> None:
    limiter = RateLimiter(1.0, 1, Now())
    for number in range(CALLERS_KEPT + 50):
        limiter.take(str(number))
    assert len(limiter._buckets) == CALLERS_KEPT
