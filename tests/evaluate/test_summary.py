"""What the terminal shows at the end of a validation."""

import io

from rich.console import Console

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


def test_the_systems_fit_a_terminal_of_80_columns():
    screen = io.StringIO()
    Console(width=80, file=screen).print(summary(synthetic_report()))
    line = next(line for line in screen.getvalue().splitlines() if line.startswith("hyco-exact"))
    assert line.rstrip().endswith("25,469")
