"""The recipe's section `keepset`: which tokens both drafters may propose, and what can be refused without a tokenizer.

Knows the fields; `stages.build_keepset` chooses the ids.
"""

from typing import Annotated

from msgspec import Meta

from hyco_export.core.scripts import script_pattern
from hyco_export.core.section import Count, Section
from hyco_export.errors import RecipeError

BYTE_TOKENS = 256  # always kept: they can spell any string


class KeepSetChoice(Section, frozen=True):
    """Which tokens both drafters may propose (Appendix A); either `size` or `coverage`.

    `coverage` asks for the smallest size that keeps this share of the held-out conversations' tokens.
    """

    size: Count | None = None
    coverage: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    scripts: tuple[str, ...] = ("Hangul",)
    held_out_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1  # of the conversations, for the coverage curve


def check_keepset_choice(choice: KeepSetChoice) -> None:
    """Refuse what no tokenizer can make right.

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
