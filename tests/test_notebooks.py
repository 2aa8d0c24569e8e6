"""The notebooks run on a small run folder, without a network, and are stored as they were written: without outputs."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import nbformat
import pytest
import torch
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from hyco_export.core.recipe_loading import load_recipe
from hyco_export.evaluate.connect import open_artifacts, read_prompts, wire_sampling
from hyco_export.evaluate.runs import DeviceRunner, run_interleaved
from hyco_export.evaluate.traces import write_traces
from hyco_export.server.engine import LocalTransport
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run, open_small_run
from tests.support.shared import built_once

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBERS = {"1", "2", "3", "4"}
CELL_LINES = 15
CELL_TIMEOUT_S = 300
SYSTEMS = ("cloud-mtp", "hyco", "hyco-exact")
PICTURE = "image/svg+xml"
ABSOLUTE_PATH = re.compile(r"""["'(\s]/(?:home|root|tmp|usr|work|Users|mnt|opt)\b|[A-Z]:\\\\""")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, a run folder with a benchmark in it, and its `recipe.yaml`."""
    torch.set_num_threads(1)
    small = open_small_run(built_once(tmp_path_factory, "small-run", build_small_run))
    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(small.root, folder / "run", copy_function=os.link)
    _bench(small, folder / "run" / "bench")
    (folder / "recipe.yaml").write_bytes(msgspec.yaml.encode(small.recipe))
    assert load_recipe(folder / "recipe.yaml") == small.recipe
    return folder


def _bench(small: SmallRun, folder: Path) -> None:
    """What `bench --traces` would record."""
    engine, info = small.serve()
    artifacts = open_artifacts(small.root, small.recipe.target)
    prompts = read_prompts(small.root.parent / "validation.jsonl", small.tokenizer, 3)
    transport = LocalTransport(engine, info)
    with DeviceRunner(artifacts, small.recipe, transport, info, trace=True) as runner:
        found = run_interleaved(runner, SYSTEMS, "torch", prompts, wire_sampling(small.recipe), 24, lambda *_: None)
    for system, traces in found.items():
        write_traces(folder / f"{system}.jsonl", traces)


class OwnInterpreter(KernelSpecManager):
    """Whatever kernels are installed on this machine: `python3` is the interpreter that runs the tests."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, measured_run: Path, tmp_path: Path) -> Iterator[None]:
    """What a kernel process gets; Jupyter's own files go to a folder of the test."""
    monkeypatch.setenv("HYCO_RUN", str(measured_run / "run"))
    monkeypatch.setenv("HYCO_RECIPE", str(measured_run / "recipe.yaml"))
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    yield


def test_there_are_four_and_the_readme_lists_them() -> None:
    assert {path.name[0] for path in NOTEBOOKS} == NUMBERS
    listed = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"]({path.name})" not in listed] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, environment: None) -> None:
    """Without an error, and with at least one picture."""
    notebook = read(path)
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=OwnInterpreter())
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, manager, timeout=CELL_TIMEOUT_S, resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(PICTURE in output.get("data", {}) for output in shown)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_no_output(path: Path) -> None:
    cells = code_cells(path)
    assert cells
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_place_of_one_machine(path: Path) -> None:
    assert ABSOLUTE_PATH.search('open("/home/me/run")') and not ABSOLUTE_PATH.search("speed/accuracy")
    found = [cell.id for cell in read(path).cells if ABSOLUTE_PATH.search(cell.source)]
    assert found == []
    assert set(read(path).metadata) == {"kernelspec", "language_info"}  # nor an editor's or a person's marks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_define_nothing(path: Path) -> None:
    """They call the package's functions: what deserves a name is part of the package."""
    for cell in code_cells(path):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= CELL_LINES, f"{path.name}, {cell.id}: {len(lines)} lines"
        assert not re.search(r"^\s*(def|class|async def) ", cell.source, re.MULTILINE), f"{path.name}, {cell.id}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_title_and_its_links_lead_somewhere(path: Path) -> None:
    first, *_ = cells = read(path).cells
    assert first.cell_type == "markdown" and first.source.startswith(f"# {path.name[0]} ")
    links = [link for cell in cells if cell.cell_type == "markdown" for link in LINK.findall(cell.source)]
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_plain_json(path: Path) -> None:
    """One line a line of source: differences stay readable."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert all(isinstance(cell["source"], list) for cell in raw["cells"])
