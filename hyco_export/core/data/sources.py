"""Reads any source of conversations (local path, Hub data set, weighted mix), and its digest for an artifact's key.

A source that is only a local path is read where it lies. Everything else (a Hub set, a mix, a selection) is written
once as JSONL with ids (`prepared`), so that every stage reads the same conversations and a second read needs no
network. Hub sets are streamed by `datasets` at a pinned commit; mixing and shuffling follow a seed.

Two draws are not left to `datasets`, because prompts are chosen by them and artifacts are made of the prompts:
`interleaved` gives the order of its `interleave_datasets` (`all_exhausted_without_replacement`) for two parts and, with
more, until the first part ends; from there it draws anew among the rest, where the library draws an ended part and
passes over it. `shuffled` draws one item at a time; the library draws a thousand places ahead and shuffles the order of
a set's files besides.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from hyco_export.core.artifact import content_digest
from hyco_export.core.data.conversations import Conversation, first_turn
from hyco_export.core.data.readers import files_digest, read_conversations, to_conversation
from hyco_export.core.files import locate
from hyco_export.core.recipe_sections import DataSource, Reference, as_source
from hyco_export.errors import RecipeError

if TYPE_CHECKING:
    from datasets import IterableDataset

T = TypeVar("T")
SHUFFLE_WINDOW = 10_000  # items held back to draw from: about 60 MB of UltraChat
PREPARED_NAME = "{name}-{digest:.16}.jsonl"  # 64 bits of the digest: the folder holds a handful of files
OnCount = Callable[[int], None]


def interleaved(sources: Sequence[Iterator[T]], weights: Sequence[float], seed: int) -> Iterator[T]:
    """Items drawn from the sources by weight; when one ends, the others share its weight; none repeats."""
    generator = np.random.default_rng(seed)
    open_sources, share = list(sources), np.asarray(weights, dtype=np.float64)
    while open_sources:
        index = int(np.searchsorted(np.cumsum(share) / share.sum(), generator.random(), side="right"))
        try:
            yield next(open_sources[index])
        except StopIteration:
            del open_sources[index]
            share = np.delete(share, index)


def shuffled(items: Iterator[T], seed: int, window: int = SHUFFLE_WINDOW) -> Iterator[T]:
    """Items in random order, each drawn from the first `window` items that are not drawn yet."""
    generator = np.random.default_rng(seed)
    held: list[T] = []
    for item in items:
        if len(held) < window:
            held.append(item)
            continue
        place = int(generator.integers(window))
        held[place], item = item, held[place]
        yield item
    yield from (held[place] for place in generator.permutation(len(held)))


def read_hub(source: DataSource) -> Iterator[Conversation]:
    """The conversations of `source.dataset` in its own order; only what is asked for is downloaded.

    Raises:
        RecipeError: unknown, gated or unreachable, a split that it does not have, or another layout.
    """
    rows = iter(_open(source))
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # the stream fails with whatever its file system raises
            raise _refusal(source, error) from error
        if row is None:
            return
        number += 1
        yield to_conversation(row, source.id_column, f"{source.dataset}, split {source.split}, row {number}")


def _open(source: DataSource) -> "IterableDataset":
    from datasets import disable_progress_bars, load_dataset

    assert source.dataset is not None  # `recipe_sections.check_source`
    if Path(source.dataset).exists():  # the library would read the folder and ignore the commit
        raise RecipeError(f"{source.dataset} is also a folder here", "name it `path`, or run from another folder")
    disable_progress_bars()
    try:
        return load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision, streaming=True)
    except Exception as error:  # datasets, huggingface_hub and the network all have their own kinds
        raise _refusal(source, error) from error


def _refusal(source: DataSource, error: Exception) -> RecipeError:
    """The error for a failed read, with its next step; `datasets` tells causes apart in its texts alone."""
    where = f"data set {source.dataset} at commit {source.revision}"
    detail = " ".join(str(error).split()) or type(error).__name__
    if "gated" in detail:
        return RecipeError(
            f"{where} is gated and this machine has no access",
            f"accept its terms at https://huggingface.co/datasets/{source.dataset}, then run: hf auth login",
        )
    if type(error).__name__ == "DatasetNotFoundError":
        return RecipeError(f"{where}: {detail}", "correct `dataset` or `revision`; if it is private: hf auth login")
    if isinstance(error, ValueError) and ("split" in detail or "onfig" in detail):
        return RecipeError(f"{where}: {detail}", "correct `split` or `subset`")
    fetch = f"hf download {source.dataset} --repo-type dataset --revision {source.revision}"
    return RecipeError(
        f"{where} cannot be read: {detail}",
        f"with a network, run: {fetch} --include '*{source.split}*' --local-dir FOLDER; then give `path: FOLDER`",
    )


def local_path(path: str, recipe_folder: Path | None) -> Path:
    """Where a data file or folder lies.

    Raises:
        RecipeError: it does not exist.
    """
    found = locate(path, recipe_folder)
    if found is None or not found.exists():
        raise RecipeError(f"{path} does not exist", "correct $.data in the recipe: a path beside it, or absolute")
    return found


def conversations(source: DataSource, recipe_folder: Path | None) -> Iterator[Conversation]:
    """The conversations of a source as a stream: read, then shuffled, cut to the limit and to first turns.

    Raises:
        RecipeError: it cannot be read.
    """
    found = _all(source, recipe_folder)
    if source.shuffle_seed is not None:
        found = shuffled(found, source.shuffle_seed)
    if source.limit is not None:
        found = islice(found, source.limit)
    return map(first_turn, found) if source.first_turn else found


def _all(source: DataSource, recipe_folder: Path | None) -> Iterator[Conversation]:
    if source.path is not None:
        return read_conversations(local_path(source.path, recipe_folder), source.id_column)
    if source.dataset is not None:
        return read_hub(source)
    parts = [conversations(part, recipe_folder) for part in source.mix]
    return interleaved(parts, [part.weight for part in source.mix], source.seed)


def local_folders(reference: Reference, recipe_folder: Path | None) -> Iterator[Path]:
    """The local folders that a source reads.

    Raises:
        RecipeError: a local path that does not exist.
    """
    source = as_source(reference)
    if source.path is not None and (found := local_path(source.path, recipe_folder)).is_dir():
        yield found
    for part in source.mix:
        yield from local_folders(part, recipe_folder)


def source_digest(reference: Reference, recipe_folder: Path | None) -> str:
    """A source's digest for an artifact's key; reads local files, never the Hub.

    A path alone: sha256 of its content. Otherwise: sha256 over the source's fields, with local paths replaced by the
    digests of their content; name, split and commit identify a Hub set.

    Raises:
        RecipeError: a local path that does not exist.
    """
    source = as_source(reference)
    if source.plain_path is not None:
        return files_digest(local_path(source.plain_path, recipe_folder))
    return content_digest(msgspec.to_builtins(_resolved(source, recipe_folder)))


def _resolved(source: DataSource, recipe_folder: Path | None) -> DataSource:
    """The source with digests in place of its local paths."""
    path = None if source.path is None else files_digest(local_path(source.path, recipe_folder))
    return msgspec.structs.replace(source, path=path, mix=tuple(_resolved(part, recipe_folder) for part in source.mix))


def at_hand(name: str, reference: Reference, recipe_folder: Path | None, folder: Path) -> Iterator[Conversation] | None:
    """A source's conversations without writing or downloading; None for a Hub set that is not `prepared` yet.

    Raises:
        RecipeError: a local path that does not exist; while reading: what is not a conversation.
    """
    source = as_source(reference)
    path = path_at_hand(name, reference, recipe_folder, folder)
    if path is not None and source.plain_path is None:
        return read_conversations(path)
    return None if source.on_hub else conversations(source, recipe_folder)


def path_at_hand(name: str, reference: Reference, recipe_folder: Path | None, folder: Path) -> Path | None:
    """The path that `prepared` would give, without writing; None where it is not there yet.

    Raises:
        RecipeError: a local path that does not exist.
    """
    source = as_source(reference)
    if source.plain_path is not None:
        return local_path(source.plain_path, recipe_folder)
    target = _target(name, source, recipe_folder, folder)
    return target if target.exists() else None


def prepared(name: str, reference: Reference, recipe_folder: Path | None, folder: Path, on_count: OnCount) -> Path:
    """The local path that holds a source's conversations; written into `folder` unless the source is a path alone.

    `name` only names the file. An existing file is not written again: its name holds the source's digest.

    Raises:
        RecipeError: the source cannot be read, or holds no conversation.
    """
    source = as_source(reference)
    if source.plain_path is not None:
        return local_path(source.plain_path, recipe_folder)
    target = _target(name, source, recipe_folder, folder)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            _write(partial, conversations(source, recipe_folder), on_count)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _target(name: str, source: DataSource, recipe_folder: Path | None, folder: Path) -> Path:
    """Where `prepared` writes a source's conversations."""
    return folder / PREPARED_NAME.format(name=name, digest=source_digest(source, recipe_folder))


def _write(path: Path, items: Iterator[Conversation], on_count: OnCount) -> None:
    encoder, done = msgspec.json.Encoder(), 0
    with path.open("wb") as stream:
        for done, conversation in enumerate(items, 1):
            stream.write(encoder.encode(conversation) + b"\n")
            on_count(done)
    if not done:
        raise RecipeError("the source holds no conversation", "correct it")
