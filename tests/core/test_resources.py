"""References to files: where they are found, and what may not be named."""

from pathlib import Path

import pytest

from hyco_export.core.files import CHECKPOINTS, locate
from hyco_export.errors import RecipeError


def test_embedded_files_are_inside_the_package():
    assert locate("embedded:verifier", None) == CHECKPOINTS / "verifier"


@pytest.mark.parametrize("name", ["../..", "../configs.py", "/etc/hostname", "verifier/../../card.py"])
def test_an_embedded_name_does_not_leave_the_family(name):
    with pytest.raises(RecipeError, match="leaves the embedded family"):
        locate(f"embedded:{name}", None)


def test_a_path_beside_the_recipe_comes_first(tmp_path):
    (tmp_path / "calibration_data").mkdir()
    assert locate("calibration_data", tmp_path) == tmp_path / "calibration_data"
    assert locate("calibration_data", None) != tmp_path / "calibration_data"
    assert locate("no/such/file", tmp_path) is None
    assert locate(str(tmp_path), None) == Path(tmp_path)
