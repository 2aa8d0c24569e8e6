"""What the terminal shows at the end of a validation."""

import io

from rich.console import Console

from hyco_export.evaluate.summary import summary
from tests.evaluate.reports import synthetic_report


def text_of(report):
    screen = io.StringIO()
    Console(width=240, file=screen).print(summary(report))
    return screen.getvalue()


def test_a_pass_ends_with_the_number_of_gates():
    text = text_of(synthetic_report())
    assert text.rstrip().endswith("PASS: all 4 gates hold")
    for words in ("cloud-mtp", "hyco-exact", "onnx-cpu", "chain acceptance", "note: The emulator"):
        assert words in text


def test_a_failure_names_every_broken_gate_with_value_and_limit():
    text = text_of(synthetic_report(failing=True))
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("FAIL: greedy texts that differ, hyco-exact on onnx-cpu: 1, must be at most 0; MAT of hyco")
    assert len([line for line in text.splitlines() if line.startswith("FAIL  ")]) == 2


def test_the_baseline_has_no_change_and_the_others_have():
    lines = text_of(synthetic_report()).splitlines()
    baseline = next(line for line in lines if line.startswith("cloud-mtp"))
    other = next(line for line in lines if line.startswith("hyco-exact"))
    assert "%" not in baseline
    assert "%)" in other
