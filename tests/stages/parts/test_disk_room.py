"""A full disk under the compiler is called that, and another failure stays what it is."""

import errno
import os
from pathlib import Path

import onnx
import pytest

from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError, StorageError
from hyco_export.graph.qnn import compile_context
from hyco_export.stages.parts.disk_room import LEAST_BYTES, binary_bytes, fits, full_disk_named, graph_bytes
from tests.support.qdq_builder import two_layer_mlp

VENDORS_WORDS = "the NPU compiler failed on head: EP_FAIL : Failed to write context cache file."  # as on a full tmpfs


def without_room(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC, least: int = 1) -> None:
    """A disk that refuses files of `least` bytes."""

    def refuse(descriptor: int, start: int, size: int) -> None:
        if size >= least:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("hyco_export.stages.parts.disk_room.os.posix_fallocate", refuse)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return two_layer_mlp(seed=1).save(tmp_path / "head.onnx")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_the_bytes_that_are_needed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    needed = binary_bytes(model)
    without_room(monkeypatch, code, least=needed)
    said = rf"{tmp_path}: No space left for the binary of head: about {needed / 1e6:.1f} MB are needed, .* MB are free"
    with pytest.raises(StorageError, match=said) as caught, full_disk_named(tmp_path, model):
        raise CompileError(VENDORS_WORDS, "its log is compile.log")
    assert VENDORS_WORDS in caught.value.message and "make room" in caught.value.hint
    assert list(tmp_path.iterdir()) == [model]


def test_another_failure_stays_what_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="refuses an operator"), full_disk_named(tmp_path, model):
        raise CompileError("the NPU compiler refuses an operator of head")
    without_room(monkeypatch, errno.EOPNOTSUPP)  # a file system that reserves nothing: free space counts
    assert fits(tmp_path, 1) and not fits(tmp_path, 2**60)


def test_weights_beside_a_graph_count(tmp_path: Path) -> None:
    path = two_layer_mlp(seed=1).save(tmp_path / "whole.onnx")
    moved = tmp_path / "moved.onnx"
    onnx.save(onnx.load(path), moved, save_as_external_data=True, location="moved.data", size_threshold=64)
    assert binary_bytes(moved) > LEAST_BYTES + graph_bytes(moved)
    assert graph_bytes(moved) == sum(each.stat().st_size for each in (moved, tmp_path / "moved.data"))


TINY_DISK = os.environ.get("HYCO_TINY_DISK")  # mount -t tmpfs -o size=8k tmpfs DIR


@pytest.mark.skipif(TINY_DISK is None, reason="HYCO_TINY_DISK names no small file system")
def test_the_real_compiler_on_a_full_file_system(model: Path, tmp_path: Path) -> None:
    out = Path(str(TINY_DISK))
    with pytest.raises(StorageError, match="No space left for the binary of head"), full_disk_named(out, model):
        compile_context(model, out, "head", TARGETS["sm8850"], tmp_path / "log")
