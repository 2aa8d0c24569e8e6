"""What the standard library documents: names, signatures and docstrings.

Reads Python files through `ast` (nothing is imported), a short list of C modules through their `__doc__`, and the
language reference's chapters from `pydoc_data.topics`.
"""

import ast
import importlib
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics
from types import ModuleType

SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"),
        *("test", "tests", "turtledemo"),
    }
)
"""Folders of the library that hold tests, data or programs, not a documented interface."""

C_MODULES = ("builtins", "math", "cmath", "itertools", "time", "operator", "collections", "functools")
"""Modules whose most used names are written in C, so that no Python file documents them."""

PUBLIC_MODULE_NAMES = {
    "asyncio": "asyncio",
    "concurrent.futures": "concurrent.futures",
    "multiprocessing.context": "multiprocessing",
    "posixpath": "os.path",
    "unittest": "unittest",
}
"""Where users import from what the files below these modules define."""

KINDS = ("class", "function", "method")

MIN_DOC_CHARS = 24
"""Shorter docstrings say nothing that an answer could be made of."""

MAX_SIGNATURE_CHARS = 60
"""Longer argument lists are shown as `...`: they would fill half an answer."""


@dataclass(frozen=True)
class DocumentedName:
    """One documented name. `owner`: a method's class, else empty; `signature`: with parentheses, empty if unknown."""

    name: str
    module: str
    owner: str
    kind: str
    signature: str
    doc: str

    @property
    def import_name(self) -> str:
        """The name to import from the module to reach the subject."""
        return self.name.removeprefix(f"{self.module}.").split(".")[0]


@cache
def documented_names() -> tuple[DocumentedName, ...]:
    """Every documented public name, sorted by name; where two files document one name the first one stays."""
    found: dict[str, DocumentedName] = {}
    for path, module in _library_files(Path(sysconfig.get_paths()["stdlib"])):
        tree = ast.parse(path.read_bytes())
        for subject in _documented(tree, module, owner=""):
            found.setdefault(subject.name, subject)
    for module_name in C_MODULES:
        for subject in _documented_in_c(importlib.import_module(module_name)):
            found.setdefault(subject.name, subject)
    return tuple(found[name] for name in sorted(found))


def reference_chapters() -> dict[str, str]:
    """Title -> text (without the title and its underline) of the language reference's chapters, sorted by title."""
    chapters: dict[str, str] = {}
    for key in sorted(topics.topics):
        title, underline, *body = topics.topics[key].strip().split("\n")
        if set(underline) <= {"*", "="}:
            chapters[title.replace('"', "")] = "\n".join(body).strip()
    return chapters


def _library_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Public modules below `root` as (file, dotted name), in a stable order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if SKIPPED_FOLDERS.isdisjoint(parts) and not any(part.startswith("_") for part in parts):
            yield path, _public_module(".".join(parts))


def _public_module(module: str) -> str:
    """The name that users import: `asyncio.tasks` -> `asyncio`."""
    for prefix, public_name in PUBLIC_MODULE_NAMES.items():
        if module == prefix or module.startswith(f"{prefix}."):
            return public_name
    return module


def _documented(scope: ast.Module | ast.ClassDef, module: str, owner: str) -> Iterator[DocumentedName]:
    """The public functions, classes and methods directly in `scope`, then those of its classes."""
    for node in scope.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        is_class = isinstance(node, ast.ClassDef)
        local_name = f"{owner}.{node.name}" if owner else node.name
        doc = ast.get_docstring(node) or ""
        if len(doc) >= MIN_DOC_CHARS:
            signature = "" if is_class else _signature(node)
            kind = "class" if is_class else "method" if owner else "function"
            yield DocumentedName(f"{module}.{local_name}", module, owner, kind, signature, doc)
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, module, local_name)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The argument list in parentheses, without `self` and annotations."""
    if isinstance(node, ast.ClassDef):
        return ""
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    text = ast.unparse(arguments)
    for first in ("self", "cls"):
        text = text.removeprefix(f"{first}, /, ").removeprefix(f"{first}, ") if text != first else ""
    return f"({text})" if len(text) <= MAX_SIGNATURE_CHARS else "(...)"


def _documented_in_c(module: ModuleType) -> Iterator[DocumentedName]:
    """Public callables of a C module and the methods of its classes; builtins are named without their module."""
    prefix = "" if module.__name__ == "builtins" else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value):
            continue
        if isinstance(value, type):
            if issubclass(value, BaseException):
                continue
            yield from _from_c(f"{prefix}{name}", module.__name__, "", "class", value)
            for attribute, method in sorted(vars(value).items()):
                if not attribute.startswith("_") and callable(method):
                    yield from _from_c(f"{prefix}{name}.{attribute}", module.__name__, name, "method", method)
        else:
            yield from _from_c(f"{prefix}{name}", module.__name__, "", "function", value)


def _from_c(name: str, module: str, owner: str, kind: str, value: object) -> Iterator[DocumentedName]:
    """One subject from a C object, if it is documented."""
    doc = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    if len(doc) < MIN_DOC_CHARS:
        return
    signature = getattr(value, "__text_signature__", None) or ""
    for hidden in ("$self, /, ", "$self, /", "$self, ", "$module, /, ", "$module, /", "$module, "):
        signature = signature.replace(hidden, "")
    shown = signature if len(signature) <= MAX_SIGNATURE_CHARS else "(...)"
    yield DocumentedName(name, module, owner, kind, shown, doc)
