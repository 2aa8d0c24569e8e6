"""What the terminal shows at the end of a validation."""

import io

import msgspec
import pytest
from rich.console import Console

from hyco_export.evaluate.metrics import Disturbances
from hyco_export.evaluate.summary import summary
from tests.evaluate.synthetic_reports import SWAPPED_NORM, synthetic_report


def text_of(report):
    screen = io.StringIO()
    Console(width=240, file=screen).print(summary(report))
    return screen.getvalue()


def test_a_pass_ends_with_the_number_of_gates():
    text = text_of(synthetic_report())
    assert text.rstrip().endswith("PASS: all 4 gates hold")
    for words in ("cloud-mtp", "hyco-exact", "onnx-cpu", "by depth", "note: The emulator"):
        assert words in text


def test_a_failure_ends_with_every_broken_gate_its_value_and_limit():
    lines = text_of(synthetic_report(failing=True)).rstrip().splitlines()
    assert [line.strip() for line in lines[-2:]] == [
        "FAIL: greedy texts that differ, hyco-exact on onnx-cpu: 1, must be at most 0",
        "FAIL: MAT of hyco: not measured, must be at least 1.8",
    ]
    assert len([line for line in lines if line.startswith("FAIL  ")]) == 2


def test_findings_are_told_and_fail_the_run():
    text = text_of(synthetic_report(findings=(SWAPPED_NORM,)))
    assert text.rstrip().endswith("FAIL: norm side, the server")
    assert "norm side, the server: h arrives from before the final norm" in text and "Next: make the two one" in text
    assert "diagnosis: nothing wrong at 32 golden positions" in text_of(synthetic_report())


def test_the_baseline_has_no_change_and_the_others_have():
    lines = text_of(synthetic_report()).splitlines()
    baseline = next(line for line in lines if line.startswith("cloud-mtp"))
    other = next(line for line in lines if line.startswith("hyco-exact"))
    assert "%" not in baseline
    assert "%)" in other


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("screen", [io.StringIO(), Terminal()], ids=["piped", "terminal"])
def test_no_value_is_shortened_where_the_output_is_narrow(screen):
    lost = Disturbances(1, 2, 3, 4.0)
    report = synthetic_report(failing=True)
    rows = tuple(msgspec.structs.replace(row, disturbances=lost) for row in report.losslessness)
    Console(width=40, file=screen).print(summary(msgspec.structs.replace(report, losslessness=rows)), crop=False)
    text = screen.getvalue()
    assert "…" not in text and "25,469" in text and "2.06 (-32%)" in text and "at least 0.97" in text
    assert any("hyco-exact" in line and "onnx-cpu" in line and "1,920" in line for line in text.splitlines())
    assert "greedy text of hyco-exact" in text and "2 sent again" in text
    whole_names = [line for line in text.splitlines() if "greedy texts that differ, hyco-exact on onnx-cpu  " in line]
    assert len(whole_names) == (0 if screen.isatty() else 1)  # gates' names wrap on a terminal


def test_the_systems_fit_a_terminal_of_80_columns():
    screen = io.StringIO()
    Console(width=80, file=screen).print(summary(synthetic_report()))
    line = next(line for line in screen.getvalue().splitlines() if line.startswith("hyco-exact"))
    assert line.rstrip().endswith("25,469")
