"""What the standard library documents: names of Python files and of C modules, and the reference's chapters."""

import ast
import math

from hyco_export.dev.tiny.documentation import (
    KINDS,
    DocumentedName,
    _documented,
    _documented_in_c,
    documented_names,
    reference_chapters,
)


def test_documented_names_of_a_module():
    source = '''
def visible(a, b: int = 2, *, c=None):
    """Says enough to be worth an answer."""
def _hidden():
    """Says enough to be worth an answer."""
def short():
    """Too short."""
class Thing:
    """Says enough to be worth an answer."""
    def method(self, x):
        """Says enough to be worth an answer."""
    def bare(self):
        """Says enough to be worth an answer."""
'''
    doc = "Says enough to be worth an answer."
    assert list(_documented(ast.parse(source), "m", owner="")) == [
        DocumentedName("m.visible", "m", "", "function", "(a, b=2, *, c=None)", doc),
        DocumentedName("m.Thing", "m", "", "class", "", doc),
        DocumentedName("m.Thing.method", "m", "Thing", "method", "(x)", doc),
        DocumentedName("m.Thing.bare", "m", "Thing", "method", "()", doc),
    ]


def test_chapters_have_no_underlines():
    chapters = reference_chapters()
    assert len(chapters) > 60
    assert not any(text.startswith("***") for text in chapters.values())


def test_names_are_sorted_unique_and_public():
    found = documented_names()
    names = [found_name.name for found_name in found]
    assert len(names) > 4000 and names == sorted(set(names))
    assert {found_name.kind for found_name in found} == set(KINDS)
    assert {"json.loads", "asyncio.gather", "math.sqrt", "dict.setdefault"} <= set(names)
    assert not any(name.startswith(("test.", "_", "asyncio.tasks.")) or "._" in name for name in names)


def test_a_name_is_imported_from_where_users_import_it():
    by_name = {found.name: found for found in documented_names()}
    assert (by_name["json.loads"].module, by_name["json.loads"].import_name) == ("json", "loads")
    method = by_name["collections.Counter.most_common"]
    assert (method.kind, method.owner, method.import_name) == ("method", "Counter", "Counter")


def test_c_functions_have_their_signature_without_the_module():
    found = {each.name: each for each in _documented_in_c(math)}
    assert found["math.gcd"].doc and "$" not in "".join(each.signature for each in found.values())
    assert found["math.sqrt"].signature == "(x, /)"
