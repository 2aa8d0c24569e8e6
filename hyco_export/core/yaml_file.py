"""YAML as a recipe's author means it: plain values, each with one reading, and a key that stands twice is a mistake.

YAML 1.1, which PyYAML reads, and 1.2 take some unquoted texts for different values (`0200`, `1:30`, `1_000`, `yes`,
dates): these are refused. Numbers are 1.2's, so `1e-5` is one. Knows YAML; no field.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from hyco_export.errors import RecipeError

PREFIX = "tag:yaml.org,2002:"
NULL, BOOL, INT, FLOAT, TEXT = f"{PREFIX}null", f"{PREFIX}bool", f"{PREFIX}int", f"{PREFIX}float", f"{PREFIX}str"
CORE_SCHEMA = {  # YAML 1.2.2, section 10.3.2
    NULL: re.compile("null|Null|NULL|~|"),
    BOOL: re.compile("true|True|TRUE|false|False|FALSE"),
    INT: re.compile("[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    FLOAT: re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
}


def read_yaml(path: Path) -> Any:
    """The plain values of a file.

    Raises:
        RecipeError: it cannot be read, is not YAML, a mapping has a key twice, or a value has two readings; names the
            lines.
    """
    try:
        return yaml.load(path.read_bytes(), _Loader)
    except FileNotFoundError as error:
        raise RecipeError(
            f"recipe {path} does not exist", "give a YAML file, or none for the embedded tiny family"
        ) from (error)
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}", "give a file that can be read") from error
    except _MistakeError as error:
        raise RecipeError(f"recipe {path}: {error}", error.hint) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"recipe {path} is not YAML: {' '.join(str(error).split())}", "correct the file") from error


class _MistakeError(Exception):
    """What is YAML, and surely not meant so."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _Loader(yaml.SafeLoader):
    """PyYAML takes the second of two equal keys in silence, and reads unquoted texts by YAML 1.1 alone."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """A scalar with a tag of its own (`!!str 0200`) has one reading, as a quoted one."""
        tag = self.peek_event().tag
        node = super().compose_scalar_node(anchor)
        if tag is not None:
            node.style = node.style or "'"
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                message = f"`{key.value}` stands twice, in lines {seen[key.value]} and {line}"
                raise _MistakeError(message, "remove one of them")
            seen[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A node's value; that of an unquoted scalar must be the same in YAML 1.1 and 1.2.

        What 1.1 takes for a text may be more in 1.2: a number such as `1e-5`.
        """
        if not isinstance(node, yaml.ScalarNode) or node.style is not None or not node.tag.startswith(PREFIX):
            return super().construct_object(node, deep)
        new = _core_value(node.value)
        if node.tag == TEXT:
            old = new
        elif node.tag in (NULL, BOOL, INT, FLOAT, f"{PREFIX}timestamp"):
            old = super().construct_object(node, deep)
        else:  # a merge key
            return super().construct_object(node, deep)
        place = f"line {node.start_mark.line + 1}: `{node.value}`"
        if repr(new) != repr(old):  # not ==: 1 is no True, and NaN is NaN
            message = f"{place} is {_words(old)} in YAML 1.1 and {_words(new)} in YAML 1.2"
            raise _MistakeError(message, "write the value that is meant, or quote a text")
        return new


def _core_value(text: str) -> Any:
    """An unquoted scalar by YAML 1.2's core schema."""
    tag = next((tag for tag, pattern in CORE_SCHEMA.items() if pattern.fullmatch(text)), TEXT)
    if tag == NULL:
        return None
    if tag == BOOL:
        return text.lower() == "true"
    if tag == INT:
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan")) if tag == FLOAT else text


def _words(value: Any) -> str:
    return f"the text {value!r}" if isinstance(value, str) else str(value).lower()
