"""The file fuzzer, small: facts or a refusal for every file, quickly; and a reader's own fault is seen."""

from pathlib import Path

import pytest

from hyco_export.errors import FormatError
from tests.endurance.fuzz_files import SUFFIXES, FileMutator, compiled, fuzz_binaries, fuzz_files, right_files


def test_mutated_files_are_read_or_refused() -> None:
    found = fuzz_files(3_000, seed=7)
    assert found.files == 3_000
    for suffix in SUFFIXES:
        assert found.outcomes[f"{suffix} read"] > 5, suffix
        assert found.outcomes[f"{suffix} refused: damaged"] > 50, suffix
    assert found.growth_mb < 32.0


def test_mutated_context_binaries_are_read_or_refused(tmp_path: Path) -> None:
    found = fuzz_binaries(8, 3, compiled(tmp_path))
    assert found.files == 8
    assert len(found.outcomes) > 1


def test_a_fault_of_a_reader_is_found(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        if path.suffix == ".gguf":
            raise KeyError(path)
        raise FormatError("damaged", "")

    with pytest.raises(AssertionError, match="gguf"):
        fuzz_files(50, seed=1, read=broken)


def test_mutations_are_repeatable(tmp_path: Path) -> None:
    rights = right_files(tmp_path)
    left, right = FileMutator(4, rights), FileMutator(4, rights)
    files = [left.file() for _ in range(200)]
    assert files == [right.file() for _ in range(200)]
    assert len(set(files)) > 150
