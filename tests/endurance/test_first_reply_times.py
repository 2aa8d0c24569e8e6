"""Newest rows first: over LTE the first draft comes in a fraction of the time, and nothing is lost for it."""

from tests.endurance import first_reply_times as times


def test_over_lte_the_first_draft_comes_at_least_five_times_sooner() -> None:
    whole, parts = times.measure("lte", 0, seed=3), times.measure("lte", 64, seed=3)
    assert parts.tokens == whole.tokens
    assert whole.first_reply_bytes > times.WINDOW * times.ROW_BYTES > 10 * parts.first_reply_bytes
    assert parts.first_draft_ms < whole.first_draft_ms / 5
    assert whole.down_bytes <= parts.down_bytes <= whole.down_bytes + 1_000  # the same rows, a few bytes of framing
    assert parts.tenth_ms < whole.tenth_ms / 2
