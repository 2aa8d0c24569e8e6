"""Files of tensors that travel to a device and back."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.bundle.raw_files import ARRAY_HEADER_BYTES, input_list, read_tensor, to_levels, write_raw
from hyco_export.core.device_spec import TensorSpec
from hyco_export.core.encodings import Encoding

TENSOR = TensorSpec("k_new.0", (2, 3), "uint16", Encoding("uint16", 0.5, 100))
IDS = TensorSpec("chain", (4,), "int32")
LEVELS = np.arange(98, 104, dtype=np.uint16).reshape(2, 3)


def test_what_is_written_is_read_again_and_listed(tmp_path: Path) -> None:
    paths = write_raw(tmp_path, "golden/a", {"k_new.0": LEVELS})
    assert paths == {"k_new.0": "golden/a/k_new.0.raw"}
    np.testing.assert_array_equal(read_tensor([tmp_path / "golden" / "a"], TENSOR).values, LEVELS)
    assert input_list([{"x": "0/x.raw", "y": "0/y.raw"}, {"x": "1/x.raw"}]) == "x:=0/x.raw y:=0/y.raw\nx:=1/x.raw\n"


@pytest.mark.parametrize(
    "name", ["k_new.0.raw", "k_new.0_native.raw", "k_new_0.raw", "k_new_0_native.raw", "k_new_0.bin"]
)
def test_every_spelling_of_a_name_is_found(tmp_path: Path, name: str) -> None:
    LEVELS.tofile(tmp_path / name)
    np.testing.assert_array_equal(read_tensor([tmp_path / "elsewhere", tmp_path], TENSOR).values, LEVELS)


def test_floats_are_told_by_their_size_and_quantised(tmp_path: Path) -> None:
    real = (LEVELS.astype(np.float32) - 100) * 0.5
    real.tofile(tmp_path / "k_new_0.raw")
    np.savez(tmp_path / "all.npz", **{"k_new.0": real.astype(np.float64), "chain": np.array([1.0, 2.0, 3.0, 4.0])})
    for place in (tmp_path, tmp_path / "all.npz"):
        read = read_tensor([place], TENSOR)
        assert read.floats and read.values is not None
        np.testing.assert_array_equal(to_levels(read.values, TENSOR), LEVELS)
    ids = read_tensor([tmp_path / "all.npz"], IDS).values
    assert ids is not None and to_levels(ids, IDS).tolist() == [1, 2, 3, 4]


def test_what_is_not_there_is_missing_and_what_does_not_fit_is_a_problem(tmp_path: Path) -> None:
    assert read_tensor([tmp_path], TENSOR).missing
    np.savez(tmp_path / "other.npz", other=LEVELS)
    assert read_tensor([tmp_path / "other.npz", tmp_path], TENSOR).missing
    for size, word in ((11, "truncated"), (13, "too long")):
        (tmp_path / "k_new_0.raw").write_bytes(b"x" * size)
        read = read_tensor([tmp_path], TENSOR)
        assert not read.missing and f"{word}: k_new_0.raw has {size} B of 12" in read.problem


def test_archives_that_do_not_fit_or_are_hostile_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "0.npz"
    for values, words in (
        (LEVELS[0], r"k_new_0 came back as [3] in 0.npz, it is [2, 3]"),
        (np.array([["a"] * 3] * 2), "k_new_0 came back as <U1 [2, 3] in 0.npz"),
        (np.zeros(10 * ARRAY_HEADER_BYTES, np.uint8), "it is [2, 3]"),  # refused by its size, before it is unpacked
        (np.array([object()] * 6).reshape(2, 3), "unreadable: 0.npz: Object arrays"),
    ):
        np.savez_compressed(path, allow_pickle=True, k_new_0=values)
        read = read_tensor([path], TENSOR)
        assert read.values is None and not read.missing and words in read.problem
    path.write_bytes(b"PK\x03\x04 cut off")
    assert "unreadable: 0.npz" in read_tensor([path], TENSOR).problem
