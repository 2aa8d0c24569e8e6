"""Building blocks of the recipe: the strict struct, shared field types, and the sections `keepset` and data sources.

Both sections come with the checks that need neither tokenizer nor data.
"""

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from hyco_export.core.keepset import script_pattern
from hyco_export.errors import RecipeError

Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a running mean
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # what numpy, torch and the server all take
BYTE_TOKENS = 256  # always kept: they can spell any string
COMMIT = re.compile("[0-9a-f]{40}")
KINDS = ("path", "dataset", "mix")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the recipe; an unknown key is an error, not a default."""


class KeepSetChoice(Section, frozen=True):
    """Which tokens both drafters may propose (Appendix A); either `size` or `coverage`.

    `coverage` asks for the smallest size that keeps this share of the held-out conversations' tokens.
    `answers_weight` > 0 also counts the verifier's captured answers to the calibration prompts, sampled ones too: so
    many times for each token, beside once for a token of the conversations. The paper counts conversations alone.
    """

    size: Count | None = None
    coverage: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    scripts: tuple[str, ...] = ("Hangul",)
    held_out_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1  # of the conversations, for the coverage curve
    answers_weight: Annotated[float, Meta(ge=0.0)] = 0.0


def check_keepset_choice(choice: KeepSetChoice) -> None:
    """Check the section without a tokenizer.

    Raises:
        RecipeError: an unknown script, not exactly one of size and coverage, or a size that cannot be.
    """
    for script in choice.scripts:
        script_pattern(script)
    if (choice.size is None) == (choice.coverage is None):
        given = "neither" if choice.size is None else "both"
        raise RecipeError(f"$.keepset has {given} of `size` and `coverage`", "give exactly one of them")
    if choice.coverage is not None and choice.held_out_share == 0:
        raise RecipeError(
            "$.keepset.held_out_share is 0, but $.keepset.coverage is measured on held-out conversations",
            "set it above 0, such as 0.1",
        )
    if choice.size is not None and choice.size <= BYTE_TOKENS:
        raise RecipeError(
            f"$.keepset.size is {choice.size}, but the {BYTE_TOKENS} byte tokens and the special tokens always stay",
            f"set it to at least {BYTE_TOKENS + 1}; build-keepset names the exact minimum of your tokenizer",
        )


class DataSource(Section, frozen=True):
    """Where conversations come from: a local path, a Hub data set, or a weighted mix; exactly one of the three.

    Each conversation has `messages` of `role` and `content`. `shuffle_seed` shuffles through a window
    (`core.data.sources.SHUFFLE_WINDOW`); without it the source's order stays. `limit` counts after shuffling.
    `first_turn` keeps nothing after the first user message, as the paper's calibration prompts (Appendix A).
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
        """The path, if the source has no other field set."""
        return self.path if self == DataSource(path=self.path, weight=self.weight) else None

    @property
    def on_hub(self) -> bool:
        """Whether any part of it comes from the Hub."""
        return self.dataset is not None or any(part.on_hub for part in self.mix)


Reference = str | DataSource  # in a recipe a plain string is a path


def as_source(reference: Reference) -> DataSource:
    """A plain string is a local path."""
    return DataSource(path=reference) if isinstance(reference, str) else reference


def check_source(reference: Reference, field: str) -> None:
    """Check that a source's fields fit together; `field` is the source's place in the recipe (`$.data.calibration`).

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
