"""Writes docs/recipes.md, the recipe reference, from the structs of the recipe and the comments of the shipped recipes.

`python -m tests.support.recipe_reference` (or `make docs`) writes it; a test compares the two.

What a field does is the comment on its line in `recipes/tiny.yaml`, which shows nearly all of them; else the comment in
the recipe of a real Gemma 3, which rounds its SLM; else the comment on its line in the struct, or the docstring of its
section; else the comment in the paper's recipe.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from msgspec import Meta

from hyco_export.core.recipe import Recipe

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "recipes.md"
SHOWN = "tiny"  # the recipe whose values stand in the column beside the defaults
PAPER = "gemma4-26b-a4b-sm8850"
RECIPES = (SHOWN, "gemma3-270m-sm8850")  # in the order in which comments are looked for
COMMENT = re.compile(r"\s#\s(.*)$")
INTRODUCTION = """\
# Recipe reference

Made from the structs in `hyco_export/core/recipe*.py` and the comments in `recipes/*.yaml` by `make docs`; do not edit.

One YAML file is one run. `name`, `models`, `data` and `keepset` must be given, everything else has a default, which is
the paper's value where the paper has one (HyCo, arXiv 2610.21436). Flags of the command line say where things are;
whatever changes the bytes of an artifact stands in the recipe. Unknown keys, wrong types and fields that do not fit
together are refused with the field's path before any work: the rules between fields are in
`hyco_export/core/recipe_loading.py`. `hyco-export run my.yaml --dry-run` reads a recipe and prints its plan.

The column "tiny" is the value in `recipes/tiny.yaml`, where it differs from the default.
"""


class Field(NamedTuple):
    """One line of a table; `default` and `tiny` as YAML would write them, empty where there is none."""

    path: str
    type: str
    default: str
    tiny: str
    meaning: str


def fields_without_meaning() -> list[str]:
    """Paths of fields that nothing explains: neither a comment nor the docstring of their section."""
    return [field.path for _, fields in _sections() for field in fields if not field.meaning]


def reference() -> str:
    """The whole document."""
    parts = [INTRODUCTION]
    for (path, section), fields in _sections():
        parts.append(f"## {path or 'Top level'}\n")
        if path:
            parts.append(inspect.cleandoc(section.__doc__ or "") + "\n")
        parts.append("| field | type | default | tiny | what it does |\n|---|---|---|---|---|")
        parts.append("\n".join("| " + " | ".join(_cell(value) for value in field) + " |" for field in fields) + "\n")
    return "\n".join(parts).rstrip() + "\n"


def _sections() -> Iterator[tuple[tuple[str, type], list[Field]]]:
    """Every section with its path, depth first; a struct that stands at several paths is shown at the first one."""
    comments = [_yaml_comments(ROOT / "recipes" / f"{name}.yaml") for name in RECIPES]
    last_resort = _yaml_comments(ROOT / "recipes" / f"{PAPER}.yaml")
    tiny = yaml.safe_load((ROOT / "recipes" / f"{SHOWN}.yaml").read_text())
    shown_at: dict[type, str] = {}
    waiting: list[tuple[str, type]] = [("", Recipe)]
    while waiting:
        path, section = waiting.pop(0)
        if shown_at.get(section, path) != path:
            continue
        shown_at[section] = path
        fields, below = [], []
        own_comments = _struct_comments(section)
        for info in msgspec.structs.fields(section):
            place = f"{path}.{info.name}" if path else info.name
            nested = _structs_in(info.type)
            below += [(place, struct) for struct in nested]
            meaning = next((found[place] for found in comments if place in found), own_comments.get(info.name, ""))
            if nested:
                links = _links(place, nested, shown_at)
                meaning = f"{comments[0][place]}: {links}" if place in comments[0] else links
            elif not meaning:
                in_docstring = f"`{info.name}`" in (section.__doc__ or "")
                meaning = "see above" if in_docstring else last_resort.get(place, "")
            default = _default(info)
            value = _at(tiny, place)
            shown = "" if nested or value is None or _yaml(value) == default else f"`{_yaml(value)}`"
            fields.append(
                Field(f"`{info.name}`", _type_text(info.type), f"`{default}`" if default else "", shown, meaning)
            )
        yield (path, section), fields
        waiting = below + waiting


def _links(place: str, nested: list[type], shown_at: dict[type, str]) -> str:
    """Links to where the structs of a field are shown: at the field's own path, or at the first field that has them."""
    headings = dict.fromkeys(shown_at.setdefault(struct, place) for struct in nested)
    return ", ".join(f"[{heading}](#{heading.replace('.', '').lower()})" for heading in headings)


def _structs_in(kind: Any) -> list[type]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    if typing.get_origin(kind) is typing.Annotated:
        return _structs_in(typing.get_args(kind)[0])
    return [struct for part in typing.get_args(kind) if not isinstance(part, str) for struct in _structs_in(part)]


def _type_text(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        base, *metas = parts
        limits = ", ".join(filter(None, (_limits(meta) for meta in metas if isinstance(meta, Meta))))
        return f"{_type_text(base)}, {limits}" if limits else _type_text(base)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        named = [_type_text(part) for part in parts if part not in (types.NoneType, msgspec.UnsetType)]
        return " or ".join(named + (["null"] if types.NoneType in parts else []))
    if origin is tuple:
        return f"list of {_type_text(parts[0])}" if parts[-1] is ... else f"[{', '.join(map(_type_text, parts))}]"
    if origin is dict:
        return f"map of {_type_text(parts[0])} to {_type_text(parts[1])}"
    if isinstance(kind, typing.ForwardRef | str):
        return "source"
    if issubclass(kind, msgspec.Struct):
        return "source" if kind.__name__ == "DataSource" else "section"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}[kind.__name__]


def _limits(meta: Meta) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    texts = [f"{sign} {getattr(meta, name):g}" for name, sign in signs.items() if getattr(meta, name) is not None]
    if meta.min_length:
        texts.append(f"at least {meta.min_length}")
    if meta.max_length:
        texts.append(f"at most {meta.max_length} characters")
    return ", ".join(texts).replace("9.22337e+18", "2^63 - 1")


def _default(info: Any) -> str:
    if info.default_factory is not msgspec.NODEFAULT:
        return "" if _structs_in(info.type) else _yaml(info.default_factory())
    if info.default is msgspec.NODEFAULT or info.default is msgspec.UNSET or isinstance(info.default, msgspec.Struct):
        return ""
    return _yaml(info.default)


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("\n...").strip()


def _at(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _yaml_comments(path: Path) -> dict[str, str]:
    """The comment on the line of every field, by the field's dotted path."""
    lines = path.read_text().splitlines()
    found: dict[str, str] = {}
    for place, node in _keys(yaml.compose(path.read_text()), ""):
        line = lines[node.start_mark.line]
        first_on_line = not line[: node.start_mark.column].strip()
        if first_on_line and (match := COMMENT.search(line)):
            found[place] = match.group(1)
    return found


def _keys(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        place = f"{path}.{key.value}" if path else key.value
        yield place, key
        yield from _keys(value, place)


def _struct_comments(section: type) -> dict[str, str]:
    """The comment on the line of every field of a struct and of those that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not (issubclass(kind, msgspec.Struct) and kind.__module__.startswith("hyco_export")):
            continue
        source = inspect.getsource(kind)
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                match = COMMENT.search(lines[node.lineno - 1])
                if match:
                    found[node.target.id] = match.group(1)
    return found


def _cell(value: str) -> str:
    return value.replace("|", "\\|")


if __name__ == "__main__":
    REFERENCE.write_text(reference())
