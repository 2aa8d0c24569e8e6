"""Prompt sets: the conversations that calibrate and those that validate. Small, and read before any long work.

Knows what makes two sets usable together; not how a prompt is answered.
"""

from pathlib import Path

from hyco_export.core.conversations import Conversation, prompt_messages
from hyco_export.core.data.files import read_conversations
from hyco_export.core.data.identity import identities
from hyco_export.errors import RecipeError

PROMPT_COUNT = "$.validation.prompts"  # the field that says how many are answered


def read_prompts(path: Path, field: str) -> list[Conversation]:
    """All prompts of a set; `field` is its place in the recipe (`$.data.validation`).

    Raises:
        RecipeError: not readable, none, one without a turn to answer, or two with one id.
    """
    try:
        prompts = list(read_conversations(path))
    except RecipeError as error:
        raise RecipeError(f"{field}: {error.message}", error.hint) from error
    if not prompts:
        raise RecipeError(f"{field}: {path} holds no conversation", "give at least one prompt")
    seen: set[str] = set()
    for prompt in prompts:
        prompt_messages(prompt)
        if prompt.id in seen:
            raise RecipeError(f"{field}: {path} holds {prompt.id!r} twice, ids must be unique", "remove one of them")
        seen.add(prompt.id)
    return prompts


def require_conversations(path: Path, field: str) -> None:
    """Read a set to its end: what is wrong with its last line is said before hours of work, not after.

    Raises:
        RecipeError: not readable, or none; names the field.
    """
    try:
        count = sum(1 for _ in read_conversations(path))
    except RecipeError as error:
        raise RecipeError(f"{field}: {error.message}", error.hint) from error
    if not count:
        raise RecipeError(f"{field}: {path} holds no conversation", "give at least one")


def require_enough(found: int, wanted: int, path: Path, asked_by: str = PROMPT_COUNT) -> None:
    """Raises RecipeError: the validation set has fewer prompts than a field or an option asks for."""
    if found < wanted:
        raise RecipeError(f"{asked_by} is {wanted}, but {path} holds {found}", f"at most {found}, or add prompts")


def require_prompts(calibration: Path, validation: Path, wanted: int) -> None:
    """Two usable sets with nothing in common, and at least `wanted` prompts to validate with.

    Raises:
        RecipeError: they are not; names the field, and the prompt that stands in both.
    """
    known = identities(read_prompts(calibration, "$.data.calibration"))
    prompts = read_prompts(validation, "$.data.validation")
    for prompt in prompts:
        if prompt in known:
            raise RecipeError(
                f"$.data.validation: conversation {prompt.id!r} also calibrates (same id or same first user message)",
                "remove it from one of the two sets: figures on calibrated prompts prove nothing",
            )
    require_enough(len(prompts), wanted, validation)
