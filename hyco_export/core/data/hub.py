"""Conversations of a Hub data set in UltraChat's layout, streamed with the `datasets` library at a pinned commit.

Knows the library's failures and says the next step; not what the conversations are used for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.conversations import Conversation
from hyco_export.core.data.files import to_conversation
from hyco_export.core.data.source import DataSource
from hyco_export.errors import RecipeError

if TYPE_CHECKING:
    from datasets import IterableDataset


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

    assert source.dataset is not None  # `core.data.source.check_source`
    if Path(source.dataset).exists():  # the library would read the folder and ignore the commit
        raise RecipeError(f"{source.dataset} is also a folder here", "name it `path`, or run from another folder")
    disable_progress_bars()
    try:
        return load_dataset(source.dataset, source.subset, split=source.split, revision=source.revision, streaming=True)
    except Exception as error:  # datasets, huggingface_hub and the network all have their own kinds
        raise _refusal(source, error) from error


def _refusal(source: DataSource, error: Exception) -> RecipeError:
    """What a failure means, and the next step: `datasets` says it in the text of few kinds of errors."""
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
