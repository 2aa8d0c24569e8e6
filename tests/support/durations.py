"""Which tests are slow, by record: a pytest plugin that measures, records, and marks what the record holds.

`slow_tests.json` lists what took more than SLOW_S: tests with the fixtures of their own, and fixtures of wider scope,
which make every test that asks for them slow. A test of the record, or one with such a fixture, gets the marker `slow`.
`--record-durations` writes anew what the run touched and keeps the rest; every run names at its end slow tests that
the record does not hold.

Seconds are processor time, of the process and of the children that it waited for: the same on a busy machine.
"""

import json
import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

SLOW_S = 5.0
RECORD = Path(__file__).resolve().parents[1] / "slow_tests.json"
FIXTURE, PHASE = "fixture_s", "phase_s"  # travel with a test's last report, from a worker process too
DIGITS = 1

Seconds = dict[str, float]


def read_record(path: Path = RECORD) -> dict[str, Seconds]:
    """Seconds by id: `fixtures` (`place::name`) and `tests` (as pytest names them)."""
    record: dict[str, Seconds] = json.loads(path.read_text(encoding="utf-8"))
    return record


def merged(record: Seconds, measured: Mapping[str, float]) -> Seconds:
    """The record with what was measured in place of what it said of the same ids; only what is slow, sorted."""
    kept = {name: seconds for name, seconds in record.items() if name not in measured}
    slow = {name: round(seconds, DIGITS) for name, seconds in measured.items() if seconds > SLOW_S}
    return dict(sorted((kept | slow).items()))


def is_slow(test: str, fixtures: Iterable[str], record: Mapping[str, Seconds]) -> bool:
    """Whether a test or one of its fixtures is in the record."""
    return test in record["tests"] or any(fixture in record["fixtures"] for fixture in fixtures)


class Durations:
    """Measures phases and fixtures in the process that runs the tests; collects them where reports arrive."""

    def __init__(self) -> None:
        self.tests: Seconds = {}
        self.fixtures: Seconds = {}
        self._item: pytest.Item | None = None
        self._inner_s: list[float] = []  # seconds of fixtures that the running ones have asked for, innermost last

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._item = item
        return (yield from _phase(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from _phase(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from _phase(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        self._inner_s.append(0.0)
        began_s = processor_s()
        try:
            return (yield)
        finally:
            whole_s = processor_s() - began_s
            own_s = whole_s - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += whole_s
            if fixturedef.scope != "function" and self._item is not None:
                self._item.user_properties.append((FIXTURE, [_fixture_id(fixturedef), own_s]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        seconds = 0.0
        for name, value in report.user_properties:
            if name == PHASE:
                seconds += float(str(value))
            elif name == FIXTURE:
                fixture, fixture_s = value  # type: ignore[misc]  # declared as an object
                self.fixtures[fixture] = max(fixture_s, self.fixtures.get(fixture, 0.0))
                seconds -= fixture_s
        self.tests[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        record, measured = read_record(), {"fixtures": self.fixtures, "tests": self.tests}
        if config.getoption("record_durations"):
            found = {kind: merged(record[kind], measured[kind]) for kind in record}
            RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            return
        for kind, known in record.items():
            for name, seconds in merged({}, measured[kind]).items():
                if name not in known:
                    terminalreporter.write_line(f"slow, not in {RECORD.name} (make durations): {seconds:.0f} s {name}")


def processor_s() -> float:
    """Processor time of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _phase(item: pytest.Item) -> Generator[None, Any, Any]:
    began_s = processor_s()
    try:
        return (yield)
    finally:
        item.user_properties.append((PHASE, processor_s() - began_s))


def _fixture_id(fixturedef: pytest.FixtureDef[Any]) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname}"


def _fixtures_of(item: pytest.Item) -> list[str]:
    """Ids of all fixtures that a test asks for, directly or through others."""
    defined = getattr(item, "_fixtureinfo", None)
    return [_fixture_id(defs[-1]) for defs in defined.name2fixturedefs.values()] if defined is not None else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help=f"write what takes more than {SLOW_S:g} s to {RECORD.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(), "durations")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    record = read_record()
    for item in items:
        if is_slow(item.nodeid, _fixtures_of(item), record):
            item.add_marker(pytest.mark.slow)
