"""Files of sets: paths, addresses on the Hub, JSON rows."""

import gzip
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.set_files import find_file, is_address, json_rows


def test_an_address_is_fetched_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options["repo_type"], options["revision"]))
        return str(tmp_path / "kept")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert find_file("hf://datasets/them/set@abc/data/q.jsonl") == tmp_path / "kept"
    find_file("hf://datasets/them/set/q.jsonl")
    assert asked == [("them/set", "data/q.jsonl", "dataset", "abc"), ("them/set", "q.jsonl", "dataset", None)]
    assert is_address("hf://x") and not is_address("/hf")


def test_what_the_hub_does_not_give_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(
        HycoError, match=r"cannot be fetched: no network \(with a network, run: hf download a/b q.jsonl"
    ):
        find_file("hf://datasets/a/b/q.jsonl")
    with pytest.raises(HycoError, match=r"hf://a/b is no address .* \(write hf://datasets/"):
        find_file("hf://a/b")
    with pytest.raises(HycoError, match=r"nowhere[.]jsonl does not exist"):
        find_file("nowhere.jsonl")


def test_rows_are_lines_or_an_array_gzipped_or_not(tmp_path: Path) -> None:
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n{"n": 2}\n')
    array.write_text('[{"n": 1},\n {"n": 2}]')
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    for path in (lines, array, packed):
        assert list(json_rows(path, dict[str, int], "a row")) == [{"n": 1}, {"n": 2}]
    lines.write_text('{"n": 1}\n{"n": "two"}')
    with pytest.raises(HycoError, match=r"a.jsonl, row 2: .* \(a row\)"):
        list(json_rows(lines, dict[str, int], "a row"))
