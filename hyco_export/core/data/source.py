"""Where a recipe's conversations come from: one local path, one Hub data set, or a weighted mix of such sources.

Knows the fields and which of them fit together; reads nothing (`core.data.reading`).
"""

import re
from collections.abc import Iterator

from hyco_export.core.section import Count, Positive, Section, Seed
from hyco_export.errors import RecipeError

COMMIT = re.compile("[0-9a-f]{40}")
KINDS = ("path", "dataset", "mix")


class DataSource(Section, frozen=True):
    """Conversations, each with `messages` of `role` and `content`. Exactly one of `path`, `dataset` and `mix`.

    `shuffle_seed` draws through a window (`core.data.mixing.SHUFFLE_WINDOW`); without it the source's order stays.
    `limit` counts after shuffling. `first_turn` keeps nothing after the first user message, as the paper's
    calibration prompts (Appendix A).
    """

    path: str | None = None  # a JSONL or Parquet file, or a folder of them
    dataset: str | None = None  # a Hub id, e.g. HuggingFaceH4/ultrachat_200k
    subset: str | None = None  # the data set's configuration, where it has several
    split: str | None = None
    revision: str | None = None  # the full commit: a branch would change what equal keys mean
    mix: tuple["DataSource", ...] = ()
    weight: Positive = 1.0  # among the other sources of its mix
    seed: Seed = 20261011  # of the order in which a mix draws from its sources
    id_column: str = "id"  # rows without it get an id made from their text
    limit: Count | None = None
    shuffle_seed: Seed | None = None
    first_turn: bool = False

    @property
    def plain_path(self) -> str | None:
        """The path, where the source is nothing but that path."""
        return self.path if self == DataSource(path=self.path, weight=self.weight) else None

    @property
    def on_hub(self) -> bool:
        """Does any part of it come from the Hub?"""
        return self.dataset is not None or any(part.on_hub for part in self.mix)


Reference = str | DataSource  # in a recipe a plain string is a path


def as_source(reference: Reference) -> DataSource:
    """A plain string is a local path."""
    return DataSource(path=reference) if isinstance(reference, str) else reference


def check_source(reference: Reference, field: str) -> None:
    """Refuse fields that do not fit together; `field` is the source's place in the recipe (`$.data.calibration`).

    Raises:
        RecipeError: the first broken rule, with the path of the field.
    """
    for message, hint in _broken_rules(as_source(reference), field):
        raise RecipeError(message, hint)


def _broken_rules(source: DataSource, field: str) -> Iterator[tuple[str, str]]:
    given = [kind for kind in KINDS if getattr(source, kind)]
    if len(given) != 1:
        yield f"{field} has {' and '.join(given) or 'no source'}", f"give exactly one of {', '.join(KINDS)}"
    if source.dataset is None:
        for name in ("subset", "split", "revision"):
            if getattr(source, name) is not None:
                yield f"{field}.{name} is for a Hub data set, {field} has none", "add `dataset` or remove the field"
    else:
        yield from _broken_hub_rules(source, field)
    for index, part in enumerate(source.mix):
        yield from _broken_rules(part, f"{field}.mix[{index}]")


def _broken_hub_rules(source: DataSource, field: str) -> Iterator[tuple[str, str]]:
    show = f"run: hf datasets info {source.dataset}"
    if source.split is None:
        yield f"{field}.split is missing: which part of {source.dataset} to read", f"to see its splits, {show}"
    if source.revision is None or not COMMIT.fullmatch(source.revision):
        yield (
            f"{field}.revision is {source.revision!r}, it must be the full commit (40 hex digits) of {source.dataset}",
            f"to see the newest commit (sha), {show}",
        )
