"""Conversations in local files: JSONL (also gzipped) or Parquet, one file or a folder of them, read as a stream.

A JSONL line is `{"messages": [{"role", "content"}, ...]}` with an optional `id`; a Parquet file has the same columns
(the layout of UltraChat 200k). Errors name the file's line or row that breaks the form. The JSON reader of
`datasets` is not used: it accepts an array in place of lines, NaN and any form of content, and counts the row that it
cannot parse within a block of the file, if at all.
"""

import codecs
import gzip
import hashlib
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hyco_export.core.artifact import file_digest
from hyco_export.core.data.conversations import Conversation, Message, content_id
from hyco_export.errors import RecipeError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ID_COLUMN = "id"
MESSAGES_COLUMN = "messages"
PARQUET, GZIP = ".parquet", ".gz"
SUFFIXES = (".jsonl", f".jsonl{GZIP}", PARQUET)
PARQUET_BATCH_ROWS = 256  # UltraChat's rows are about 6 KB of text: 1.5 MB at a time
LINE_FORM = 'every line must be {"id": text, "messages": [{"role": text, "content": text}, ...]}, id optional'
ROW_FORM = "every row needs `messages`, a list of {role: text, content: text}; convert the set to that layout"
SHAREGPT_COLUMN = "conversations"
SHAREGPT_FORM = (
    "this is ShareGPT's layout: call `conversations` messages, `from` role and `value` content, "
    "human user and gpt assistant"
)
SHOWN_FILES = 3  # of each kind that is left out


class _Row(msgspec.Struct, frozen=True):
    """The two columns that are read; a row may have more."""

    messages: tuple[Message, ...]
    id: str | int | None = None


@dataclass(frozen=True)
class Listing:
    """The data files of a path, in name order, and the other paths there by why they are not read."""

    read: tuple[Path, ...]
    left_out: Mapping[str, tuple[Path, ...]]

    @property
    def remark(self) -> str:
        """What is read and what is not, in one line; "" where everything is read."""
        parts = []
        for why, paths in self.left_out.items():
            more = ", ..." if len(paths) > SHOWN_FILES else ""
            parts.append(f"{len(paths)} {why} ({', '.join(path.name for path in paths[:SHOWN_FILES])}{more})")
        return f"{len(self.read)} files are read; not read: {', '.join(parts)}" if parts else ""

    @property
    def counts(self) -> dict[str, int]:
        """How many files are read, and how many are left out by reason."""
        return {"read": len(self.read), **{why: len(paths) for why, paths in self.left_out.items()}}


def read_conversations(path: Path, id_column: str = ID_COLUMN) -> Iterator[Conversation]:
    """The conversations of a file, or of a folder's files in name order, one batch in memory at a time.

    Raises:
        RecipeError: nothing to read there, or a line or row that is not a conversation; names file, place and field.
    """
    for file in data_files(path):
        yield from _read_parquet(file, id_column) if _is_parquet(file) else _read_jsonl(file, id_column)


def data_files(path: Path) -> list[Path]:
    """`path` itself, or the JSONL and Parquet files below a folder, in name order (`list_files`).

    Raises:
        RecipeError: it does not exist, or is a folder without one.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RecipeError(f"{path} does not exist", "correct $.data in the recipe")
    listing = list_files(path)
    if not listing.read:
        raise RecipeError(
            f"folder {path} holds no .jsonl or .parquet file" + (f": {listing.remark}" if listing.remark else ""),
            "give a folder of conversations; a checkpoint belongs under $.models",
        )
    return list(listing.read)


def list_files(path: Path) -> Listing:
    """The data files below a folder, linked folders included: each non-empty file once.

    Hidden files and folders are left out (`.ipynb_checkpoints` holds copies), and files with the bytes of an earlier
    one: their text would be counted twice.
    """
    if path.is_file():
        return Listing((path,), {})
    left_out: dict[str, list[Path]] = {}
    read: list[Path] = []
    by_size: dict[int, list[Path]] = {}
    for file in sorted(_walk(path, left_out)):
        if file.name.startswith("."):
            why = "hidden"
        elif not file.is_file():
            why = "no file or a link to nothing"
        elif not file.name.lower().endswith(SUFFIXES):
            why = "of another kind"
        elif not (size := file.stat().st_size):
            why = "empty"
        elif any(file_digest(file) == file_digest(earlier) for earlier in by_size.get(size, ())):
            why = "a copy of another"
        else:
            by_size.setdefault(size, []).append(file)
            read.append(file)
            continue
        left_out.setdefault(why, []).append(file)
    return Listing(tuple(read), {why: tuple(paths) for why, paths in left_out.items()})


def _walk(path: Path, left_out: dict[str, list[Path]]) -> Iterator[Path]:
    """All files below a folder; each folder is entered once, hidden ones never."""
    seen = {path.resolve()}
    for root, folders, files in os.walk(path, followlinks=True):
        entered = []
        for name in sorted(folders):
            folder = Path(root, name)
            if name.startswith("."):
                left_out.setdefault("hidden", []).append(folder)
            elif folder.resolve() in seen:
                left_out.setdefault("a link to a folder that is read", []).append(folder)
            else:
                seen.add(folder.resolve())
                entered.append(name)
        folders[:] = entered
        yield from (Path(root, name) for name in files)


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(PARQUET)


def conversation_count(path: Path) -> int:
    """How many conversations a file or folder holds, without decoding them.

    Raises:
        RecipeError: as `data_files`, or a Parquet file that cannot be read.
    """
    return sum(_rows(file) for file in data_files(path))


def _rows(path: Path) -> int:
    if _is_parquet(path):
        return int(_parquet(path).metadata.num_rows)
    return sum(1 for _ in _lines(path))


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
    _require_messages(row, place)
    try:
        messages = msgspec.convert(row[MESSAGES_COLUMN], tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise RecipeError(f"{place}, column {MESSAGES_COLUMN!r}: {error}", ROW_FORM) from error
    return _named(row.get(id_column), messages)


def _named(name: object, messages: tuple[Message, ...]) -> Conversation:
    """A conversation under its row's id (number or text), else under one made from its text."""
    return Conversation(content_id(messages) if name in (None, "") else str(name), messages)


def _require_messages(columns: Iterable[str], place: str, form: str = ROW_FORM) -> None:
    """Raises RecipeError: no `messages` column; names the columns there are."""
    names = list(columns)
    if MESSAGES_COLUMN not in names:
        hint = f"{SHAREGPT_FORM}; {form}" if SHAREGPT_COLUMN in names else form
        shown = f"only {', '.join(map(repr, names))}" if names else "and no other"
        raise RecipeError(f"{place} has no column {MESSAGES_COLUMN!r}, {shown}", hint)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a JSONL file with their numbers, from 1; without a byte order mark.

    Raises:
        RecipeError: it cannot be read, is UTF-16, or is damaged.
    """
    try:
        with gzip.open(path) if path.name.lower().endswith(GZIP) else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    convert = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > utf8.jsonl"
                    raise RecipeError(f"{path} is UTF-16, JSONL is UTF-8", f"convert it: {convert}")
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read to its end: {error}", "fetch or write it again") from error


def _read_jsonl(path: Path, id_column: str) -> Iterator[Conversation]:
    row_type: Any = _Row if id_column == ID_COLUMN else _renamed(id_column)
    decoder = msgspec.json.Decoder(row_type)
    for number, line in _lines(path):
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _broken_line(path, number, line, error) from error
        yield _named(row.id, row.messages)


def _broken_line(path: Path, number: int, line: bytes, error: Exception) -> RecipeError:
    """The error for a line that is no conversation: another layout, a whole array, or the decoder's own words."""
    place = f"{path.name}, line {number}"
    if line.lstrip().startswith(b"["):
        convert = f"jq -c '.[]' {shlex.quote(str(path))} > lines.jsonl"
        return RecipeError(f"{place} begins a JSON array, not a conversation", f"write one a line: {convert}")
    try:
        _require_messages(msgspec.json.decode(line, type=dict[str, Any]), f"{place}: the row", LINE_FORM)
    except RecipeError as other_columns:
        return other_columns
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # no JSON at all: the decoder's words name the place
    return RecipeError(f"{place}: {error}", LINE_FORM)


def _renamed(id_column: str) -> type[Any]:
    """A row type whose id stands in another column."""
    return msgspec.defstruct(
        "_Row",
        [("messages", tuple[Message, ...]), ("id", str | int | None, None)],
        rename={"id": id_column},
        frozen=True,
    )


def _parquet(path: Path) -> "ParquetFile":
    """Raises RecipeError: not a Parquet file, or one without the column of messages."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise RecipeError(f"{path} is not a readable Parquet file: {error}", "fetch or write it again") from error
    _require_messages(table.schema_arrow.names, str(path))
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
