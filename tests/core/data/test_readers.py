"""Reading conversations from JSONL, Parquet and folders of both; every broken form is named."""

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from hyco_export.core.data.conversations import content_id
from hyco_export.core.data.readers import conversation_count, data_files, files_digest, list_files, read_conversations
from hyco_export.errors import RecipeError

GOOD = '{"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes.\\n"}]}'
CUT_SHORT = gzip.compress(GOOD.encode(), mtime=0)[:-9]  # without the time: a test has one name in every process
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_lines_come_in_order_and_empty_ones_are_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n\n" + GOOD.replace('"a"', '"b"') + "\n")
    assert [c.id for c in read_conversations(path)] == ["a", "b"]
    assert conversation_count(path) == 2


def test_fields_beside_id_and_messages_are_allowed(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD.replace('"id"', '"source": 3, "id"'))
    assert len(list(read_conversations(path))) == 1


def test_a_conversation_without_an_id_gets_one_from_its_text_in_every_form(tmp_path):
    lines = tmp_path / "data.jsonl"
    lines.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    table = write_parquet(tmp_path / "data.parquet", [{"prompt": "Hi", "messages": MESSAGES}])
    (from_lines,), (from_table,) = read_conversations(lines), read_conversations(table)
    assert from_lines == from_table
    assert from_lines.id == content_id(from_lines.messages)


def test_parquet_rows_come_in_order_with_their_ids(tmp_path):
    rows = [{"id": f"r{i}", "prompt_id": f"p{i}", "messages": MESSAGES} for i in range(5)]
    path = write_parquet(tmp_path / "data.parquet", rows)
    assert [c.id for c in read_conversations(path)] == ["r0", "r1", "r2", "r3", "r4"]
    assert [c.id for c in read_conversations(path, "prompt_id")] == ["p0", "p1", "p2", "p3", "p4"]
    assert conversation_count(path) == 5


def test_another_id_column_of_jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt_id": "p", "id": 7, "messages": MESSAGES}) + "\n")
    assert [c.id for c in read_conversations(path, "prompt_id")] == ["p"]


def test_a_folder_is_read_file_by_file_and_digested_by_content(tmp_path):
    (tmp_path / "set" / "deep").mkdir(parents=True)
    write_parquet(tmp_path / "set" / "b.parquet", [{"id": "two", "messages": MESSAGES}])
    (tmp_path / "set" / "a.jsonl").write_text(GOOD)
    (tmp_path / "set" / "deep" / "c.jsonl").write_text(GOOD.replace('"a"', '"three"'))
    (tmp_path / "set" / "README.md").write_text("not data")
    assert [c.id for c in read_conversations(tmp_path / "set")] == ["a", "two", "three"]
    before = files_digest(tmp_path / "set")
    (tmp_path / "set" / "README.md").write_text("other")
    assert files_digest(tmp_path / "set") == before
    (tmp_path / "set" / "a.jsonl").rename(tmp_path / "set" / "z.jsonl")
    assert files_digest(tmp_path / "set") != before


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"id": 3.5, "messages": []}', "$.id"),
        ('{"id": "x"}', "messages"),
        ('{"id": "x", "messages": [{"role": "user"}]}', "content"),
        ('{"id": "x", "messages"', "truncated"),
        ('{"conversations": [{"from": "human", "value": "Hi"}]}', "messages"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, part):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n" + line + "\n")
    with pytest.raises(RecipeError) as caught:
        list(read_conversations(path))
    assert caught.value.message.startswith("data.jsonl, line 2: ")
    assert part in caught.value.message
    assert "every line must be" in caught.value.hint


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}\n')
    with pytest.raises(RecipeError, match="line 1"):
        list(read_conversations(path))


def test_a_parquet_file_of_another_layout_is_refused_with_its_columns(tmp_path):
    path = write_parquet(tmp_path / "data.parquet", [{"text": "Hi", "label": 1}])
    for reading in (lambda: list(read_conversations(path)), lambda: conversation_count(path)):
        with pytest.raises(RecipeError, match=r"data.parquet has no column 'messages', only 'text', 'label'"):
            reading()
    path = write_parquet(tmp_path / "other.parquet", [{"messages": [{"from": "human", "value": "Hi"}]}])
    with pytest.raises(RecipeError, match=r"other.parquet, row 1, column 'messages': .*role"):
        list(read_conversations(path))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(RecipeError, match=r"cut.parquet is not a readable Parquet file"):
        list(read_conversations(tmp_path / "cut.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"folder .*empty holds no .jsonl or .parquet file") as caught:
        list(read_conversations(tmp_path / "empty"))
    assert "$.models" in caught.value.hint
    with pytest.raises(RecipeError, match=r"none.jsonl does not exist"):
        list(read_conversations(tmp_path / "none.jsonl"))


def test_a_number_is_an_id_too_and_an_empty_text_is_none(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"id": name, "messages": MESSAGES} for name in (7, "8", "", None)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = next(read_conversations(path, "no such column")).id
    assert [item.id for item in read_conversations(path)] == ["7", "8", made, made]
    path.write_text(json.dumps({"key": 7, "messages": MESSAGES}) + "\n")
    assert [item.id for item in read_conversations(path, "key")] == ["7"]


def test_marks_line_ends_and_compression_change_nothing(tmp_path):
    wanted = [("a", 2), ("a", 2)]
    forms = {
        "mark.jsonl": b"\xef\xbb\xbf" + f"{GOOD}\n{GOOD}\n".encode(),
        "crlf.jsonl": f"{GOOD}\r\n\r\n{GOOD}".encode(),
        "UPPER.JSONL": f"\n  \n{GOOD}\n{GOOD}\n".encode(),
        "packed.jsonl.gz": gzip.compress(f"{GOOD}\n{GOOD}\n".encode()),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        assert [(item.id, len(item.messages)) for item in read_conversations(tmp_path / name)] == wanted
        assert conversation_count(tmp_path / name) == 2
    assert {file.name for file in data_files(tmp_path)} == set(forms)


@pytest.mark.parametrize(
    ("name", "content", "message", "hint"),
    [
        ("a.jsonl", GOOD.encode("utf-16"), "is UTF-16", "iconv -f UTF-16"),
        ("a.jsonl", f"[{GOOD},\n{GOOD}]".encode(), "line 1 begins a JSON array", "jq -c"),
        ("a.jsonl", f"\n[{GOOD}]".encode(), "line 2 begins a JSON array", "jq -c"),
        ("a.jsonl", GOOD.encode() + b",\n", "line 1: JSON is malformed", "every line must be"),
        ("a.jsonl", b'{"messages": [], "score": NaN}', "line 1: JSON is malformed", "every line must be"),
        ("a.jsonl", GOOD.encode() + b"\n\0\n", "line 2: JSON is malformed", "every line must be"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "content", "every line must be"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1", "every line must be"),
        ("a.jsonl", b'{"conversations": [{"from": "human", "value": "x"}]}', "only 'conversations'", "ShareGPT"),
        ("a.jsonl.gz", CUT_SHORT, "cannot be read to its end", "fetch or write it again"),
        ("a.jsonl.gz", GOOD.encode(), "cannot be read to its end", "fetch or write it again"),
    ],
)
def test_what_is_no_jsonl_is_named_with_the_way_to_make_it_so(tmp_path, name, content, message, hint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        list(read_conversations(tmp_path / name))
    assert message in caught.value.message and name in caught.value.message
    assert hint in caught.value.hint


def test_a_folder_says_what_is_read_and_what_is_not(tmp_path):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for path in (folder / ".ipynb_checkpoints", folder / "sub", elsewhere):
        path.mkdir(parents=True)

    def line(name):
        return json.dumps({"id": name, "messages": MESSAGES}) + "\n"

    (folder / "a.jsonl").write_text(line("a"))
    (folder / ".ipynb_checkpoints" / "a-checkpoint.jsonl").write_text(line("a"))
    (folder / ".hidden.jsonl").write_text(line("h"))
    (folder / "copy of a.jsonl").write_text(line("a"))
    (folder / "empty.jsonl").touch()
    for name in ("README.md", "b.json", "c.txt", "d.csv"):
        (folder / name).write_text(line("x"))
    (folder / "sub" / "e.jsonl").write_text(line("e"))
    (elsewhere / "f.jsonl").write_text(line("f"))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "gone.jsonl").symlink_to(tmp_path / "nothing")
    listing = list_files(folder)
    assert [file.relative_to(folder).as_posix() for file in listing.read] == [
        "a.jsonl",
        "linked/f.jsonl",
        "sub/e.jsonl",
    ]
    assert listing.counts == {
        "read": 3,
        "hidden": 2,
        "a copy of another": 1,
        "empty": 1,
        "of another kind": 4,
        "a link to a folder that is read": 1,
        "no file or a link to nothing": 1,
    }
    assert "4 of another kind (README.md, b.json, c.txt, ...)" in listing.remark
    assert listing.remark.startswith("3 files are read; not read: ")
    assert [item.id for item in read_conversations(folder)] == ["a", "f", "e"]
    before = files_digest(folder)
    (folder / "c.txt").write_text("another")
    assert files_digest(folder) == before
    assert list_files(elsewhere).remark == ""


def test_a_folder_of_which_nothing_is_read_says_what_lies_there(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(
        RecipeError, match=r"holds no .jsonl or .parquet file: 0 files .* 1 of another kind \(data.json\)"
    ):
        data_files(tmp_path)
