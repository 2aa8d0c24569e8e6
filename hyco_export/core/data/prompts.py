"""Prompt sets: checks of the conversations that calibrate, validate and are counted, made before any long work."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.core.data.conversations import ROLE_HINT, ROLES, Conversation, Identities, identities, prompt_messages
from hyco_export.core.data.readers import read_conversations
from hyco_export.errors import CheckpointError, RecipeError

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
    for number, prompt in enumerate(prompts, 1):
        with prompt_named(f"{field}: {path}", number, prompt):
            prompt_messages(prompt)
        if prompt.id in seen:
            raise RecipeError(f"{field}: {path} holds {prompt.id!r} twice, ids must be unique", "remove one of them")
        seen.add(prompt.id)
    return prompts


@contextmanager
def prompt_named(field: str, number: int, conversation: Conversation) -> Iterator[None]:
    """Name the prompt in errors of the block: the `number`-th of its set, from 1."""
    try:
        yield
    except (RecipeError, CheckpointError) as error:
        message = f"{field}: conversation {number} ({conversation.id!r}): {error.message}"
        raise type(error)(message, error.hint) from error


def require_counted(found: Iterable[Conversation], field: str, asked: Identities) -> tuple[int, str]:
    """Read the set that will be counted to its end, so that a broken last line is reported before hours of work.

    Args:
        found: its conversations.
        field: its place in the recipe, for messages.
        asked: the conversations that calibrate or validate, which are not counted.

    Returns:
        How many conversations there are, and a remark on those without an assistant's text, "" where there are none.

    Raises:
        RecipeError: not readable, none, or no assistant's text outside the `asked`; names field and roles.
    """
    total = spoken = excluded = 0
    roles: Counter[str] = Counter()
    try:
        for conversation in found:
            total += 1
            roles.update(message.role for message in conversation.messages)
            if conversation in asked:
                excluded += 1
            elif any(conversation.assistant_texts):
                spoken += 1
    except RecipeError as error:
        raise RecipeError(f"{field}: {error.message}", error.hint) from error
    if not total:
        raise RecipeError(f"{field} holds no conversation", "give at least one")
    turns = ", ".join(f"{count} of {role!r}" for role, count in roles.most_common()) or "none"
    if not spoken:
        used = f"; {excluded} calibrate or validate and are not counted" if excluded else ""
        raise RecipeError(
            f"{field}: none of {total} conversations has an assistant's text to count (turns: {turns}{used})",
            ROLE_HINT if roles.keys() - set(ROLES) else "give conversations with the assistant's answers in them",
        )
    silent = total - excluded - spoken
    return total, f"{silent} of {total} conversations hold no assistant's text (turns: {turns})" if silent else ""


def require_enough(found: int, wanted: int, path: Path, asked_by: str = PROMPT_COUNT) -> None:
    """Raises RecipeError: the validation set has fewer prompts than a field or an option asks for."""
    if found < wanted:
        raise RecipeError(f"{asked_by} is {wanted}, but {path} holds {found}", f"at most {found}, or add prompts")


def require_prompts(calibration: Path, validation: Path, wanted: int) -> None:
    """Check that both sets are usable, have nothing in common, and that at least `wanted` prompts validate.

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
