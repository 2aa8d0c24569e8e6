"""Errors of the operating system, references to shipped and local files, and safetensors files written in pieces."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.files import CHECKPOINTS, Declared, TensorWriter, locate, storage_error, storage_errors
from hyco_export.errors import ArtifactError, GateError, RecipeError, StorageError


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


GENERATOR = np.random.default_rng(0)
TENSORS = {
    "z.scales": GENERATOR.random(5).astype(np.float32),
    "a.integers": GENERATOR.integers(0, 255, (5, 3)).astype(np.uint8),
    "b": GENERATOR.integers(-9, 9, (4, 7)).astype(np.int8),
    "norm": GENERATOR.random((2, 2)).astype(np.float32),
    "é": np.array(1.5, np.float32),
}
DECLARED = {name: Declared(values.dtype.name, values.shape) for name, values in TENSORS.items()}


def test_bytes_are_those_of_save_file(tmp_path: Path) -> None:
    metadata = {"layout": '{"a": "x/y"}'}
    save_file(TENSORS, tmp_path / "library", metadata=metadata)
    with TensorWriter(tmp_path / "ours", DECLARED, metadata) as writer:
        for name, values in reversed(TENSORS.items()):
            if values.ndim == 2:
                writer.put(name, values[1:], first_row=1)
                writer.put(name, values[:1])
            else:
                writer.put(name, values)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_a_tensor_left_out_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"2 tensors were not written whole, first norm"),
        TensorWriter(tmp_path / "ours", DECLARED, {}) as writer,
    ):
        for name in ("z.scales", "é", "a.integers"):
            writer.put(name, TENSORS[name])


def test_another_type_or_width_is_refused(tmp_path: Path) -> None:
    with TensorWriter(tmp_path / "ours", {"b": DECLARED["b"]}, {}) as writer:
        with pytest.raises(ValueError, match=r"b is uint8 \(4, 7\), declared as"):
            writer.put("b", TENSORS["b"].view(np.uint8))
        with pytest.raises(ValueError, match=r"b is int8 \(4, 6\)"):
            writer.put("b", TENSORS["b"][:, 1:])
        writer.put("b", TENSORS["b"])
