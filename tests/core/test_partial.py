"""Units of work are finished whole or not at all, and a damaged one is not taken for finished."""

from pathlib import Path

import pytest

from hyco_export.core.artifact import WORK_FOLDER, PartialBuild


def finish_one(folder: Path) -> PartialBuild:
    partial = PartialBuild(folder)
    with partial.place("deep/a.txt") as draft:
        draft.write_text("content")
    partial.finish("a", ["deep/a.txt"], {"tokens": 3})
    return partial


def test_a_finished_unit_is_found_with_its_note(tmp_path: Path) -> None:
    finish_one(tmp_path)
    receipt = PartialBuild(tmp_path).finished("a")
    assert receipt is not None
    assert receipt.note == {"tokens": 3}
    assert list(receipt.files) == ["deep/a.txt"]
    assert PartialBuild(tmp_path).finished("b") is None


@pytest.mark.parametrize("content", ["contenu", "conten", None])
def test_a_unit_with_an_altered_cut_or_missing_file_is_not_finished(tmp_path: Path, content: str | None) -> None:
    partial = finish_one(tmp_path)
    path = tmp_path / "deep" / "a.txt"
    path.unlink() if content is None else path.write_text(content)
    assert partial.finished("a") is None


def test_a_damaged_receipt_is_none(tmp_path: Path) -> None:
    partial = finish_one(tmp_path)
    (receipt,) = (tmp_path / WORK_FOLDER).glob("a.*")
    receipt.write_bytes(receipt.read_bytes()[:-5])
    assert partial.finished("a") is None


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    partial = PartialBuild(tmp_path)
    with pytest.raises(KeyboardInterrupt), partial.place("a.txt") as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_forgotten_unit_leaves_nothing(tmp_path: Path) -> None:
    finish_one(tmp_path).forget("a", ["deep/a.txt"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
