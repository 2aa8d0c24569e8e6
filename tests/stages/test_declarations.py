"""The libraries of a stage are those that its code uses: followed import by import, without running any."""

import ast
import sys
from collections.abc import Iterator

import pytest

from hyco_export.core.deferred import Deferred
from hyco_export.core.files import PACKAGE
from hyco_export.stages.declarations import LIBRARIES, Stage, version_changes
from hyco_export.stages.table import SLM_STAGES, STAGES

MODULE_NAMES = {"aimet-torch": "aimet_torch", "onnxruntime-qnn": "onnxruntime_qnn"}
PREPARED = "datasets"  # writes the conversations that a stage reads, before it (`stages.checks.prepare_data`)
REACHED = {  # what a stage's modules import and its bytes do not depend on
    "capture": (),
    "qat-head": ("jinja2", "tokenizers"),  # of a tokenizer's module, beside what finds checkpoints
    "build-keepset": ("jinja2",),  # no template: the assistant's turns are counted alone
    "convert-head": ("jinja2", "tokenizers", "aimet-torch"),  # of training, beside the stored head
    "convert-slm": ("jinja2", "aimet-torch"),
    "compile": (),
}


def imports(module: str) -> Iterator[str]:
    """Names that a module imports when it is loaded or used, those of `TYPE_CHECKING` apart."""
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    if path.is_file():
        yield from names_in(ast.parse(path.read_text(encoding="utf-8")))


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{name.name}" for name in node.names)
    for part in ast.iter_child_nodes(node):
        yield from names_in(part)


def reached(module: str) -> set[str]:
    """Top-level names outside the package that a module and all that it imports use."""
    seen: set[str] = set()
    found, queue = set(), [module]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for imported in imports(name):
            if imported.partition(".")[0] != PACKAGE.name:
                found.add(imported.partition(".")[0])
            elif not imported.startswith(f"{PACKAGE.name}.stages.table"):  # names every stage
                queue.append(imported)
    assert len(seen) > 20
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("stage", [*STAGES, SLM_STAGES[0]], ids=lambda stage: str(stage.build))
def test_a_stage_names_the_libraries_that_its_code_uses(stage: Stage) -> None:
    assert isinstance(stage.build, Deferred)
    used = reached(stage.build.find().__module__)
    names = {name for name in LIBRARIES if MODULE_NAMES.get(name, name) in used}
    assert set(stage.libraries) - {"python", PREPARED} == names - set(REACHED[stage.name])
    assert len(set(stage.libraries)) == len(stage.libraries) > 3


def test_libraries_that_a_stage_does_not_use_are_passed_over() -> None:
    assert version_changes({"torch": "0.1"}, ("numpy",)) == ""
    assert version_changes({"torch": "0.1"}, ("torch",)).startswith("built with torch 0.1, now ")
    assert "no library" in version_changes({}, ("torch",))
