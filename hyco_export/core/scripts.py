"""Unicode scripts of a text: which tokens belong to a writing system that a recipe wants to keep whole.

Knows script names and letters; no tokenizer and no keep set.
"""

from collections.abc import Iterable

import numpy as np
import regex

from hyco_export.errors import RecipeError


def script_pattern(script: str) -> regex.Pattern[str]:
    """A pattern that finds one letter of `script`, a value of Unicode's Script property (`Hangul`, `Latin`, `Han`).

    Marks, digits and punctuation of a script do not count: they appear beside letters that do.

    Raises:
        RecipeError: Unicode has no script of that name.
    """
    unknown = RecipeError(
        f"$.keepset.scripts names {script!r}, which is not a script of Unicode",
        "use a value of the Script property, such as Hangul, Latin, Han or Arabic",
    )
    if not script.isidentifier():
        raise unknown
    try:
        return regex.compile(rf"(?V1)[\p{{Script={script}}}&&\p{{Letter}}]")
    except regex.error as error:
        raise unknown from error


def in_scripts(texts: Iterable[str], scripts: Iterable[str]) -> np.ndarray:
    """bool [n]: does text i contain a letter of one of `scripts`.

    Raises:
        RecipeError: a script that Unicode does not have.
    """
    patterns = [script_pattern(script) for script in scripts]
    return np.array([any(pattern.search(text) for pattern in patterns) for text in texts], dtype=bool)
