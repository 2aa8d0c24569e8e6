"""YAML as a recipe's author means it: plain values, and a key that stands twice is a mistake.

Knows YAML; no field.
"""

from pathlib import Path
from typing import Any

import yaml

from hyco_export.errors import RecipeError


def read_yaml(path: Path) -> Any:
    """The plain values of a file.

    Raises:
        RecipeError: it cannot be read, is not YAML, or a mapping has a key twice; names the lines.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}", "give a file that can be read") from error
    except _TwiceError as error:
        raise RecipeError(f"recipe {path}: {error}", "remove one of them") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"recipe {path} is not YAML: {' '.join(str(error).split())}", "correct the file") from error


class _TwiceError(Exception):
    """A key that stands twice in one mapping."""


class _Loader(yaml.SafeLoader):
    """PyYAML takes the second of two equal keys in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise _TwiceError(f"`{key.value}` stands twice, in lines {seen[key.value]} and {line}")
            seen[key.value] = line
        return super().construct_mapping(node, deep)
