"""Tables and pictures of costs hold their figures, and equal figures give equal files."""

import csv

import pytest

from hyco_export.evaluate.cost_table import Panel, write_csv, write_picture


def test_a_table_keeps_its_figures(tmp_path):
    write_csv(tmp_path / "t.csv", [{"tensor": "a,b", "bits": 4, "kl": 1 / 3}, {"tensor": "c", "bits": 8, "kl": 0.0}])
    lines = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [line["tensor"] for line in lines] == ["a,b", "c"]
    assert float(lines[0]["kl"]) == pytest.approx(1 / 3, rel=1e-5)
    with pytest.raises(ValueError, match="at least one row"):
        write_csv(tmp_path / "empty.csv", [])


def test_a_picture_shows_every_row_and_is_reproducible(tmp_path):
    names = [f"layers.{index}.mlp" for index in range(30)]
    panels = (Panel("SQNR", [float(index) for index in range(30)]), Panel("gain", [-1.0, None] + [0.0] * 28))
    for name in ("one.svg", "two.svg"):
        write_picture(tmp_path / name, "a title", names, panels)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in (*names, "SQNR", "gain", "a title", "29"))
