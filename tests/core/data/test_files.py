"""Reading conversations from JSONL, Parquet and folders of both; every broken form is named."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from hyco_export.core.data.files import conversation_count, files_digest, read_conversations
from hyco_export.core.data.identity import content_id
from hyco_export.errors import RecipeError

GOOD = '{"id": "a", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes.\\n"}]}'
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
        ('{"id": 3, "messages": []}', "$.id"),
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
