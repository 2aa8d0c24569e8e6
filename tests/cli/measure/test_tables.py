"""`tables` in the terminal and as JSON."""

import json
from pathlib import Path

import pytest

from hyco_export.cli.measure.tables import print_tables
from hyco_export.evaluate.traces import write_traces
from tests.evaluate.synthetic_traces import generation, round_trace


def test_two_folders_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, accepted in (("small", (0,)), ("large", (0, 1, 2, 6))):
        drawn = (False,) * len(accepted)
        made = generation(round_trace(accepted, drawn=drawn), round_trace(()))
        write_traces(tmp_path / name / "hyco.jsonl", [made])
        (tmp_path / name / "plan.json").write_text(
            json.dumps({"systems": ["hyco"], "kept_tokens": len(accepted) * 1000})
        )
    folders = [tmp_path / "small", tmp_path / "large"]
    print_tables(folders, tmp_path / "tables.json")
    said = " ".join(capsys.readouterr().out.split())
    assert "MAT 1.50 3.00" in said and "change +100.0%" in said and "keep set 1,000 4,000" in said
    assert "and a leaf below 0.0% 50.0%" in said
    assert "chain 100% 75%" in said and "p90 20 20" in said
    rows = json.loads((tmp_path / "tables.json").read_bytes())
    assert [row["mat"] for row in rows] == [1.5, 3.0]
