"""The clocks that measure a pass."""

from hyco_export.server.interfaces import ProcessCpuClock, ThreadCpuClock


def test_cpu_clocks_see_work() -> None:
    for clock in (ThreadCpuClock(), ProcessCpuClock()):
        mark = clock.start()
        sum(range(200_000))
        spent_ms = clock.elapsed_ms(mark)
        assert 0.1 < spent_ms < 10_000
