"""Files of prompt sets and references: a path, or an address on the Hub; and JSON lines of a known layout.

An address is `hf://datasets/OWNER/NAME/FILE`, or with a commit or branch `hf://datasets/OWNER/NAME@REVISION/FILE`.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hyco_export.errors import HycoError, first_line

Row = TypeVar("Row")
SCHEME = "hf://"
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")
ADDRESS_FORM = "write hf://datasets/OWNER/NAME@REVISION/FILE"


def is_address(text: str) -> bool:
    """Does it name a file on the Hub."""
    return text.startswith(SCHEME)


def find_file(text: str) -> Path:
    """The local path of a file; one on the Hub is fetched once and kept in the Hub's cache.

    Raises:
        HycoError: no such file, or the Hub does not give it.
    """
    if not is_address(text):
        path = Path(text).expanduser()
        if not path.exists():
            raise HycoError(f"{path} does not exist", "correct the path, or give an hf:// address")
        return path
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise HycoError(f"{text} is no address of a file on the Hub", ADDRESS_FORM)
    from huggingface_hub import hf_hub_download

    try:
        fetched = hf_hub_download(
            found["name"], found["file"], repo_type="dataset", revision=found["revision"], etag_timeout=30
        )
    except Exception as error:  # the library and the network have kinds of their own
        fetch = f"hf download {found['name']} {found['file']} --repo-type dataset --local-dir FOLDER"
        raise HycoError(
            f"{text} cannot be fetched: {first_line(error)}", f"with a network, run: {fetch}; then give the file's path"
        ) from error
    return Path(fetched)


def json_rows(path: Path, row: type[Row], form: str) -> Iterator[Row]:
    """The rows of a JSON Lines file, gzipped or not, or of a JSON array; other fields of a row are ignored.

    Args:
        form: what a row looks like, for the error.

    Raises:
        HycoError: unreadable, or a row of another layout; names its line.
    """
    decoder = msgspec.json.Decoder(row)
    for number, line in enumerate(_lines(path), 1):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HycoError(f"{path}, row {number}: {error}", form) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The rows' JSON, one at a time: a novel has a megabyte."""
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
        first = stream.readline().removeprefix(b"\xef\xbb\xbf")
        if first.lstrip().startswith(b"["):
            try:
                yield from msgspec.json.decode(first + stream.read(), type=list[msgspec.Raw])
            except msgspec.DecodeError as error:
                raise HycoError(f"{path} is not a JSON array: {error}", "fetch or write it again") from error
            return
        if first.strip():
            yield first
        yield from (line for line in stream if line.strip())
