"""`dev node-scores`: a table for each file, and whether a gain is worth an option."""

from pathlib import Path

import pytest

from hyco_export.cli.measure.node_scores import compare_scores
from hyco_export.evaluate.traces import write_traces
from tests.evaluate.planning.test_node_scores import traces


def test_each_file_has_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_traces(tmp_path / "hyco.jsonl", traces())
    compare_scores([tmp_path / "hyco.jsonl"], [2, 3])
    shown = capsys.readouterr().out
    assert "hyco, 4 prompts, 40 rounds, rule exact" in shown
    assert "+63.6% [+63.6%, +63.6%]" in shown
    assert "1.800" in shown
    assert "yes" in shown
    assert "next: " in shown
