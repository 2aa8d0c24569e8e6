"""Refusals by the operating system, as Python and as libraries in Rust report them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.files import storage_error, storage_errors
from hyco_export.errors import ArtifactError, GateError, StorageError


def raised(action) -> Exception:
    with pytest.raises(Exception) as caught:
        action()
    return caught.value


def test_python_names_the_file(tmp_path: Path) -> None:
    found = storage_error(raised(lambda: (tmp_path / "none" / "x").write_text("")))
    assert found is not None
    assert found.message == f"{tmp_path / 'none' / 'x'}: No such file or directory"
    assert found.exit_code == 2


def test_safetensors_is_understood_and_the_place_said(tmp_path: Path) -> None:
    error = raised(lambda: save_file({"a": np.zeros(4)}, tmp_path / "none" / "x"))
    assert not isinstance(error, OSError)
    found = storage_error(error, tmp_path)
    assert found is not None
    assert found.message == f"{tmp_path}: No such file or directory"


def test_a_full_disk_has_its_own_next_step(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=rf"{tmp_path}: No space left on device \(make room"),
        storage_errors(tmp_path),
    ):
        Path("/dev/full").write_text("text")


@pytest.mark.parametrize(
    "error", [KeyError("x"), GateError("low"), ArtifactError("not a keep set: No such file (os error 2)")]
)
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    assert storage_error(error, tmp_path) is None
    with pytest.raises(type(error)) as caught, storage_errors(tmp_path):
        raise error
    assert caught.value is error
