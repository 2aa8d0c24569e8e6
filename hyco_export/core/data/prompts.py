"""Prompt sets: checks of the conversations that calibrate, validate and are counted, made before any long work."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hyco_export.core.data.conversations import (
    ROLE_HINT,
    ROLES,
    Conversation,
    Identities,
    content_id,
    identities,
    prompt_messages,
)
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
    return require_usable(prompts, f"{field}: {path}")


def require_usable(prompts: list[Conversation], place: str) -> list[Conversation]:
    """The same prompts; `place` is the field, and the path where there is one.

    Raises:
        RecipeError: none, one without a turn to answer, or two with one id.
    """
    if not prompts:
        raise RecipeError(f"{place} holds no conversation", "give at least one prompt")
    seen: set[str] = set()
    for number, prompt in enumerate(prompts, 1):
        with prompt_named(place, number, prompt):
            prompt_messages(prompt)
        if prompt.id in seen:
            raise RecipeError(f"{place} holds {prompt.id!r} twice, ids must be unique", "remove one of them")
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


def require_counted(found: Iterable[Conversation], field: str, asked: Identities) -> tuple[int, list[str]]:
    """Read the set that will be counted to its end, so that a broken last line is reported before hours of work.

    Args:
        found: its conversations.
        field: its place in the recipe, for messages.
        asked: the conversations that calibrate or validate, which are not counted.

    Returns:
        How many conversations there are, and remarks on those that hold nothing to count or repeat another.

    Raises:
        RecipeError: not readable, none, or no assistant's text outside the `asked`; names field and roles.
    """
    total = answered = excluded = odd_roles = 0
    roles: Counter[str] = Counter()
    texts: set[str] = set()
    try:
        for conversation in found:
            total += 1
            roles.update(message.role for message in conversation.messages)
            texts.add(content_id(conversation.messages))
            if conversation in asked:
                excluded += 1
            elif any(conversation.assistant_texts):
                answered += 1
            else:
                odd_roles += any(message.role not in ROLES for message in conversation.messages)
    except RecipeError as error:
        raise RecipeError(f"{field}: {error.message}", error.hint) from error
    if not total:
        raise RecipeError(f"{field} holds no conversation", "give at least one")
    turns = ", ".join(f"{count} of {role!r}" for role, count in roles.most_common()) or "none"
    if not answered:
        used = f"; {excluded} calibrate or validate and are not counted" if excluded else ""
        raise RecipeError(
            f"{field}: none of {total} conversations has an assistant's text to count (turns: {turns}{used})",
            ROLE_HINT if roles.keys() - set(ROLES) else "give conversations with the assistant's answers in them",
        )
    unanswered, remarks = total - excluded - answered, []
    if unanswered:
        roles_shown = ", ".join(repr(role) for role in sorted(roles.keys() - set(ROLES)))
        why = f"; {odd_roles} of them have turns of unknown roles: {roles_shown}; {ROLE_HINT}" if odd_roles else ""
        remarks.append(
            f"{unanswered} of {total} conversations hold no assistant's text (turns: {turns}), "
            f"only the others are counted{why}"
        )
    if repeated := total - len(texts):
        remarks.append(f"{repeated} of {total} conversations repeat another word for word, and are counted again")
    return total, remarks


def require_enough(found: int, wanted: int, path: Path | str, asked_by: str = PROMPT_COUNT) -> None:
    """Raises RecipeError: the validation set has fewer prompts than a field or an option asks for."""
    if found < wanted:
        raise RecipeError(f"{asked_by} is {wanted}, but {path} holds {found}", f"at most {found}, or add prompts")


def require_prompts(calibration: Path, validation: Path, wanted: int) -> None:
    """Check that both sets are usable, have nothing in common, and that at least `wanted` prompts validate.

    Raises:
        RecipeError: they are not; names the field, and the prompt that stands in both.
    """
    calibrating = read_prompts(calibration, "$.data.calibration")
    require_apart(calibrating, read_prompts(validation, "$.data.validation"), wanted, str(validation))


def require_apart(
    calibration: Iterable[Conversation], validation: Sequence[Conversation], wanted: int, place: str
) -> None:
    """Two sets with nothing in common, and at least `wanted` to validate with; `place` is where those are.

    Raises:
        RecipeError: they are not; names the prompt that stands in both.
    """
    known = identities(calibration)
    for prompt in validation:
        if prompt in known:
            raise RecipeError(
                f"$.data.validation: conversation {prompt.id!r} also calibrates (same id or same first user message)",
                "remove it from one of the two sets: figures on calibrated prompts prove nothing",
            )
    require_enough(len(validation), wanted, place)
