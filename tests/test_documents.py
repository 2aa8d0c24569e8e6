"""What README and docs say: their commands work, their lists are those of the package, their links lead somewhere."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.core import TyperGroup

from hyco_export.cli.app import app
from hyco_export.device.systems import SYSTEMS
from hyco_export.errors import ProtocolError
from hyco_export.evaluate.diagnosis.finding import MEANINGS
from hyco_export.server.chat.chat_request import read_request
from tests.support import recipe_reference

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hyco_export"
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
DOCUMENTS = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    PACKAGE / "protocol" / "PROTOCOL.md",
)
README_LINES, GLOSSARY_TERMS = 150, 40

BLOCK = re.compile(r"^```(?:sh|bash|shell)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LISTED_FILE = re.compile(r"^- `([^`]+)`:", re.MULTILINE)
TERM = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)
REDIRECTION = re.compile(r" > [\w.]+$")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
QUICK = ("hyco-export targets", "hyco-export --help")  # run as they stand; they need no artifact
DRY = ("run", "compile", "capture", "qat-head", "build-keepset", "convert-head", "convert-slm")
PROGRAM = (sys.executable, "-m", "hyco_export")


class Command(NamedTuple):
    """One line of a shell block."""

    document: str
    text: str


def commands() -> list[Command]:
    """Every command of every shell block: continued lines joined, comments gone."""
    return [
        Command(path.name, text)
        for path in DOCUMENTS
        for block in BLOCK.findall(path.read_text(encoding="utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        if (text := re.sub(r"(^|\s+)# .*$", "", line).strip())
    ]


def hyco_arguments(words: Sequence[str]) -> list[str] | None:
    """What follows `hyco-export`, or `-m hyco_export` of a launcher; None for another program."""
    if words[0].removeprefix(".venv/bin/") == "hyco-export":
        return list(words[1:])
    if "hyco_export" in words and words[words.index("hyco_export") - 1] in ("-m", "--"):
        return list(words[words.index("hyco_export") + 1 :])
    return None


def require_parsed(arguments: Sequence[str]) -> None:
    """Parse as the command line would, without running: unknown commands, options and values raise."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="hyco-export")
    rest = list(arguments)
    while isinstance(command, TyperGroup) and rest[:1] != ["--help"]:
        if not rest and command.invoke_without_command:
            return
        _, command, rest = command.resolve_command(context, rest)
    if "--help" not in rest:
        command.make_context(command.name, rest, parent=context)


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def require_known(command: Command) -> None:
    """A command that is not run: its options, targets, files or extras are there."""
    text = REDIRECTION.sub("", command.text)
    words = [word for word in shlex.split(text) if not ASSIGNMENT.fullmatch(word)]
    arguments = hyco_arguments(words)
    if arguments is not None:
        require_parsed(arguments)
        return
    program = Path(words[0]).name
    if program == "make":
        assert set(words[1:]) <= make_targets()
    elif program == "pip":
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        asked = re.findall(r"\[([\w,]+)\]", command.text)
        assert {name for group in asked for name in group.split(",")} <= extras
    elif program == "python" and words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if word.startswith("tests"))
    elif program == "python" and words[1] == "-m":
        assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").exists()
    elif program == "python":
        assert (ROOT / words[1]).exists()
    elif program == "curl" and "/v1/chat/completions" in text:
        read_request(words[words.index("-d") + 1].encode()).conversation()
    else:
        assert program in (".", "git"), f"{command}: nothing here knows how to check it"


COMMANDS = commands()


def test_documents_have_commands() -> None:
    assert len(COMMANDS) > 25
    assert {command.document for command in COMMANDS} >= {"README.md", "CONTRIBUTING.md", "serving.md", "devices.md"}
    assert any(command.text in QUICK for command in COMMANDS)
    assert any(_dry_run(command) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.document}: {command.text[:70]}")
def test_a_command_of_the_documents_is_one(command: Command, tmp_path: Path) -> None:
    if command.text.startswith("(umask 077; python -c"):
        text = command.text.replace("python -c", f"{shlex.quote(sys.executable)} -c")
        subprocess.run(["bash", "-c", text], cwd=tmp_path, check=True)
        assert len((tmp_path / "token").read_text().strip()) >= 32
        assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    else:
        require_known(command)


@pytest.mark.parametrize("text", sorted({command.text for command in COMMANDS if command.text in QUICK}))
def test_a_quick_command_runs(text: str, tmp_path: Path) -> None:
    done = subprocess.run([*PROGRAM, *shlex.split(text)[1:]], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip()


def _dry_run(command: Command) -> list[str] | None:
    """Arguments of a building command of a recipe that ships."""
    arguments = hyco_arguments(shlex.split(command.text))
    if not arguments or arguments[0] not in DRY:
        return None
    arguments = [word for word in arguments if word != "--dry-run"]
    recipes = [word for word in arguments if word.endswith((".yaml", ".yml"))]
    return arguments if all((ROOT / word).exists() for word in recipes) else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    sorted({tuple(found) for command in COMMANDS if (found := _dry_run(command))}),
    ids=lambda arguments: " ".join(arguments),
)
def test_a_building_command_plans(arguments: tuple[str, ...], tmp_path: Path) -> None:
    place = ["--run", str(tmp_path / "run")]
    done = subprocess.run([*PROGRAM, *arguments, *place, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "capture" in done.stdout
    assert not (tmp_path / "run").exists()


def test_python_in_documents_finds_its_names() -> None:
    blocks = [block for path in DOCUMENTS for block in PYTHON_BLOCK.findall(path.read_text(encoding="utf-8"))]
    imports = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    assert len(imports) > 5
    for node in imports:
        assert node.module is not None
        module = importlib.import_module(node.module)
        assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_wrong_commands_are_found() -> None:
    refused = (
        typer.BadParameter.__mro__[2],
        AssertionError,
        ProtocolError,
    )  # the base of all that a command line refuses
    for text, message in (
        ("hyco-export serve --prot 8411", "--prot"),
        ("hyco-export serve --port many", "integer"),
        ("hyco-export convert-heads", "convert-heads"),
        ("make demonstration", "demonstration"),
        ("curl example.org", "nothing here knows"),
        ('curl http://x/v1/chat/completions -d \'{"model": "m"}\'', "messages"),
    ):
        with pytest.raises(refused, match=message):
            require_known(Command("none", text))


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_glossary_is_short_and_in_order() -> None:
    terms = TERM.findall(GLOSSARY.read_text(encoding="utf-8"))
    assert 20 < len(terms) <= GLOSSARY_TERMS
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms, key=str.lower)


def test_file_map_is_the_package() -> None:
    listed = LISTED_FILE.findall(ARCHITECTURE.read_text(encoding="utf-8"))
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert len(modules) > 100
    assert len(set(listed)) == len(listed), "a file stands twice in docs/architecture.md"
    missing, gone = modules - set(listed), {name for name in listed if not (PACKAGE / name).is_file()}
    assert not missing, f"docs/architecture.md has no line for {sorted(missing)}"
    assert not gone, f"docs/architecture.md names files that are gone: {sorted(gone)}"


def test_files_named_in_documents_exist() -> None:
    """Paths in code marks that begin with a folder of the package or of the repository."""
    rooms = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"))
    named = re.compile(rf"`((?:(?:hyco_export/)?(?:{rooms})|tests|recipes|docs)/[\w./-]+\.\w+)`")
    found = {(path.name, name) for path in DOCUMENTS for name in named.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 100
    gone = sorted((path, name) for path, name in found if not ((ROOT / name).exists() or (PACKAGE / name).exists()))
    assert not gone


def test_names_beside_files_stand_in_them() -> None:
    """In the architecture `path` (`name`, `Class.method`): a reader who opens the file finds the name."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)` \(((?:`[A-Za-z_.]+`(?:, | and )?)+)\)", text)
    found = {(path, name.split(".")[-1]) for path, names in named for name in re.findall(r"`([^`]+)`", names)}
    assert len(found) > 12
    gone = [(path, name) for path, name in found if name not in (PACKAGE / path).read_text(encoding="utf-8")]
    assert not gone


def test_systems_faults_commands_and_options_are_told() -> None:
    measuring = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    assert not [name for name in SYSTEMS if f"`{name}`" not in measuring]
    faults = re.findall(r"^\| `([^`]+)` \|", measuring[measuring.index("| fault |") :], re.MULTILINE)
    assert faults == list(MEANINGS)
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    everything = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    group = program.commands["dev"]
    assert isinstance(group, TyperGroup)
    shown = [name for name, command in program.commands.items() if not command.hidden]
    shown += [f"dev {name}" for name in group.commands] + ["recipes show"]
    assert len(shown) > 15
    assert not [name for name in shown if f"hyco-export {name}" not in everything]
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    options = {name for parameter in program.commands["serve"].params for name in parameter.opts if name[0] == "-"}
    assert len(options) > 15
    assert not [name for name in options if name not in serving]


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_between_documents_resolve() -> None:
    found, broken = 0, []
    for path in DOCUMENTS:
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if target.startswith(("http://", "https://")):
                continue
            found += 1
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
                broken.append(f"{path.name}: {target}")
    assert found > 20
    assert not broken


def test_every_document_is_reached_from_the_readme() -> None:
    linked = {(README.parent / target.partition("#")[0]).resolve() for target in LINK.findall(README.read_text())}
    assert {path.resolve() for path in (ROOT / "docs").glob("*.md")} <= linked


def test_recipe_reference_is_current() -> None:
    assert not recipe_reference.fields_without_meaning()
    written = recipe_reference.REFERENCE.read_text(encoding="utf-8")
    assert written == recipe_reference.reference(), "run `make docs`"


def test_documents_are_in_the_source_distribution() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {"docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {*included["include"]}
