"""`inspect` on foreign files, bundles and pairs: exit codes and what stands there."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.cli.workbench import inspection
from hyco_export.cli.workbench.inspection import inspect_path
from hyco_export.errors import ArtifactError, FormatError


def weights(path: Path, factor: float = 1.0) -> Path:
    values = np.arange(1, 65, dtype=np.float32).reshape(8, 8)
    save_file({"layers.0.up": values, "layers.1.up": values * np.float32(factor)}, path)
    return path


def test_a_foreign_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = weights(tmp_path / "w.safetensors")
    assert inspect_path(path) == 0
    said = capsys.readouterr().out
    assert "w.safetensors: safetensors" in said and "2 tensors, 512 B" in said
    assert "layers.1.up" in said and "float32 [8, 8]" in said
    assert inspect_path(path, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["shape"] == [8, 8]


def test_two_files_that_differ_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = weights(tmp_path / "l.safetensors"), weights(tmp_path / "r.safetensors", 1.01)
    assert inspect_path(left, left) == 0
    assert "1 file says the same" in capsys.readouterr().out
    assert inspect_path(left, right) == 1
    said = capsys.readouterr().out
    assert "layers.1" in said and "40.0 dB" in said and "layers.0" not in said
    assert inspect_path(left, right, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["files"][0]["layers"][0]["layer"] == "layers.1"


def test_long_lists_are_cut_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"layers.{number}.up" for number in range(inspection.SHOWN_ROWS + 5)]
    save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "many.safetensors")
    inspect_path(tmp_path / "many.safetensors")
    assert "5 more: --json" in capsys.readouterr().out


def test_a_bundle_is_told_from_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "bundle.json").write_text('{"version": 1, "graphs": [{"name": "head"}]}')
    weights(tmp_path / "graphs" / "tables.safetensors")
    assert inspect_path(tmp_path) == 0
    said = capsys.readouterr().out
    assert "version" in said and "graphs/tables.safetensors" in said
    (tmp_path / "bundle.json").write_text('{"version": ')
    with pytest.raises(FormatError, match="not JSON"):
        inspect_path(tmp_path)
    (tmp_path / "bundle.json").unlink()
    with pytest.raises(ArtifactError, match="is no artifact"):
        inspect_path(tmp_path)
