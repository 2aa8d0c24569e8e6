"""The picture of a bisection."""

from pathlib import Path

import msgspec

from hyco_export.workbench.bisect import Divergence, open_subject
from hyco_export.workbench.divergence_picture import divergence_picture, write_divergence
from tests.workbench.test_bisect import MADE, parted, with_fault


def test_the_picture_marks_the_place(run: Path, tmp_path: Path) -> None:
    broken = with_fault(run, tmp_path / "broken")
    found = parted(open_subject(broken, "slm_tree", 1), "onnx-cpu", tmp_path / "log")
    picture = divergence_picture(found)
    assert f"{MADE}: " in picture and "SQNR, dB" in picture and picture == divergence_picture(found)
    write_divergence(tmp_path / "p.svg", found)
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Divergence) == found
