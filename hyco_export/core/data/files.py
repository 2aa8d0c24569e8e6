"""Conversations in local files: JSONL or Parquet, one file or a folder of them, read as a stream.

A JSONL line is `{"messages": [{"role", "content"}, ...]}` with an optional `id`; a Parquet file has the same columns
(the layout of UltraChat 200k). Knows files and names the line that breaks the form; not what the text is used for.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hyco_export.core.artifact import file_digest
from hyco_export.core.conversations import Conversation, Message
from hyco_export.core.data.identity import content_id
from hyco_export.errors import RecipeError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ID_COLUMN = "id"
MESSAGES_COLUMN = "messages"
SUFFIXES = (".jsonl", ".parquet")
PARQUET_BATCH_ROWS = 256  # UltraChat's rows are about 6 KB of text: 1.5 MB at a time
LINE_FORM = 'every line must be {"id": text, "messages": [{"role": text, "content": text}, ...]}, id optional'
ROW_FORM = "every row needs `messages`, a list of {role: text, content: text}; convert the set to that layout"


class _Row(msgspec.Struct, frozen=True):
    """The two columns that are read; a row may have more."""

    messages: tuple[Message, ...]
    id: str | None = None


def read_conversations(path: Path, id_column: str = ID_COLUMN) -> Iterator[Conversation]:
    """The conversations of a file, or of a folder's files in name order, one batch in memory at a time.

    Raises:
        RecipeError: nothing to read there, or a line or row that is not a conversation; names file, place and field.
    """
    for file in data_files(path):
        yield from _read_parquet(file, id_column) if file.suffix == ".parquet" else _read_jsonl(file, id_column)


def data_files(path: Path) -> list[Path]:
    """`path` itself, or the JSONL and Parquet files below a folder, in name order.

    Raises:
        RecipeError: it does not exist, or is a folder without one.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RecipeError(f"{path} does not exist", "correct $.data in the recipe")
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise RecipeError(
            f"folder {path} holds no {' or '.join(SUFFIXES)} file",
            "give a folder of conversations; a checkpoint belongs under $.models",
        )
    return found


def conversation_count(path: Path) -> int:
    """How many conversations a file or folder holds, without decoding them.

    Raises:
        RecipeError: as `data_files`, or a Parquet file that cannot be read.
    """
    return sum(_rows(file) for file in data_files(path))


def _rows(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(_parquet(path).metadata.num_rows)
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def files_digest(path: Path) -> str:
    """sha256 of a file, or over the names and contents of a folder's data files.

    Raises:
        RecipeError: as `data_files`.
    """
    if path.is_file():
        return file_digest(path)
    lines = [f"{file.relative_to(path).as_posix()}:{file_digest(file)}\n" for file in data_files(path)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def to_conversation(row: dict[str, Any], id_column: str, place: str) -> Conversation:
    """One row of a table; `place` says which, for the error.

    Raises:
        RecipeError: no `messages`, or not of that form; names the columns that are there.
    """
    if MESSAGES_COLUMN not in row:
        raise RecipeError(f"{place} has no column {MESSAGES_COLUMN!r}, only {', '.join(map(repr, row))}", ROW_FORM)
    try:
        messages = msgspec.convert(row[MESSAGES_COLUMN], tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise RecipeError(f"{place}, column {MESSAGES_COLUMN!r}: {error}", ROW_FORM) from error
    name = row.get(id_column)
    return Conversation(content_id(messages) if name is None else str(name), messages)


def _read_jsonl(path: Path, id_column: str) -> Iterator[Conversation]:
    row_type: Any = _Row if id_column == ID_COLUMN else _renamed(id_column)
    decoder = msgspec.json.Decoder(row_type)
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RecipeError(f"{path.name}, line {number}: {error}", LINE_FORM) from error
            yield Conversation(row.id or content_id(row.messages), row.messages)


def _renamed(id_column: str) -> type[Any]:
    """The row whose id stands in another column."""
    return msgspec.defstruct(
        "_Row", [("messages", tuple[Message, ...]), ("id", str | None, None)], rename={"id": id_column}, frozen=True
    )


def _parquet(path: Path) -> "ParquetFile":
    """Raises RecipeError: not a Parquet file, or one without the column of messages."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise RecipeError(f"{path} is not a readable Parquet file: {error}", "fetch or write it again") from error
    columns = table.schema_arrow.names
    if MESSAGES_COLUMN not in columns:
        raise RecipeError(f"{path} has no column {MESSAGES_COLUMN!r}, only {', '.join(map(repr, columns))}", ROW_FORM)
    return table


def _read_parquet(path: Path, id_column: str) -> Iterator[Conversation]:
    from pyarrow import ArrowException

    table = _parquet(path)
    wanted = [name for name in (id_column, MESSAGES_COLUMN) if name in table.schema_arrow.names]
    batches = table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=wanted)
    number = 0
    while True:
        try:
            batch = next(batches, None)
        except (ArrowException, OSError) as error:
            raise RecipeError(f"{path} is damaged after row {number}: {error}", "fetch or write it again") from error
        if batch is None:
            return
        for row in batch.to_pylist():
            number += 1
            yield to_conversation(row, id_column, f"{path.name}, row {number}")
