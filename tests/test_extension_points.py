"""One place to add: each test adds something new to a copy of the package, file by file, and uses it.

The keys of an edit are the files that a contributor has to touch; their number is what the test is about. An edit is a
text that stands in the file, and what is inserted behind it; "" as the text makes a new file.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.files import resource_path
from hyco_export.core.recipe_loading import embedded_recipe
from hyco_export.evaluate.traces import write_traces
from hyco_export.protocol.tree import Source, Tree
from hyco_export.protocol.wire import Evidence
from tests.evaluate.synthetic_traces import generation, round_trace

PACKAGE = Path(__file__).parent.parent / "hyco_export"
Edits = Mapping[str, Mapping[str, str]]


class Copy:
    """A copy of the package with edits in it."""

    def __init__(self, folder: Path, edits: Edits) -> None:
        self.folder = folder
        shutil.copytree(PACKAGE, folder / "hyco_export", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("recipes", "calibration_data"):
            (folder / name).symlink_to(resource_path(name).resolve())
        for name, insertions in edits.items():
            path = folder / "hyco_export" / name
            for place, text in insertions.items():
                if not place:
                    assert not path.exists()
                    path.write_text(text)
                    continue
                source = path.read_text()
                assert source.count(place) == 1, (name, place)
                path.write_text(source.replace(place, place + text))

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def command(self, *arguments: str) -> str:
        """stdout of `hyco-export ...`, which must succeed."""
        done = self.python("-m", "hyco_export", *arguments)
        assert done.returncode == 0, done
        return done.stdout

    def script(self, text: str) -> None:
        """Run assertions with the edited package."""
        done = self.python(
            "-c", f"import hyco_export\nassert hyco_export.__file__.startswith({str(self.folder)!r})\n{text}"
        )
        assert done.returncode == 0, done.stderr

    def recipe(self, place: str, text: str) -> str:
        """The embedded recipe with `text` for what stands at `place`."""
        recipe = embedded_recipe().read_text()
        assert recipe.count(place) == 1, place
        path = self.folder / "recipe.yaml"
        path.write_text(recipe.replace(place, text))
        return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One logged round: a child that the verifier did not draw, with p~ = .2."""
    evidence = Evidence([10], [-1], [11, 12], [0.2], [0.2], [1.0, 1.0])
    record = round_trace(tree=Tree((10,), (-1,), (-0.4,), (Source.CHAIN,)), tokens=(11,), evidence=evidence)
    path = tmp_path / "trace.jsonl"
    write_traces(path, [msgspec.structs.replace(generation(record), max_new_tokens=9)])
    return path


TARGET = {
    "core/targets.py": {
        '        Target("x2-elite", "Snapdragon X2 Elite", "SC8480XP", 88, 81),\n': (
            '        Target("sm9999", "Snapdragon of tomorrow", "SM9999", 99, 83),\n'
        )
    }
}


def test_a_target_takes_one_file(tmp_path: Path) -> None:
    assert len(TARGET) == 1
    copy = Copy(tmp_path, TARGET)
    assert "Snapdragon of tomorrow" in copy.command("targets")
    copy.script(
        "from hyco_export.cli.options import open_run\nassert open_run(None, None, 'sm9999').recipe.target == 'sm9999'"
    )


RULE = {
    "protocol/wire.py": {
        '    posterior_alpha: Annotated[float, Meta(description="For `typical`.")] = 0.3\n': (
            '    floor: Annotated[float, Meta(description="For `floor`.")] = 0.5\n'
        )
    },
    "protocol/acceptance.py": {
        "RULES: dict[str, Rule] = {\n    rule.name: rule\n    for rule in (\n": (
            '        Rule(\n            "floor",\n            "or its probability reaches the floor",\n'
            "            lambda seen, settings, draw_only: epsilon(seen, settings.floor, draw_only),\n"
            '            frozenset({PROBS}),\n            frozenset({"floor", STOP_NEEDS_DRAW}),\n        ),\n'
        )
    },
}


def test_an_acceptance_rule_with_an_option_takes_two_files(tmp_path: Path, trace: Path) -> None:
    assert len(RULE) == 2
    copy = Copy(tmp_path / "copy", RULE)
    assert "--floor" in copy.command("replay", "--help")
    mats = []
    for floor in ("0.3", "0.1"):
        copy.command("replay", str(trace), "--rule", "floor", "--floor", floor, "--json", str(tmp_path / "rows.json"))
        (row,) = json.loads((tmp_path / "rows.json").read_text())
        mats.append(row["mat"])
    assert mats == [1, 2]  # the bonus alone; the child of p~ = .2 too


DRAFTER = {
    "core/recipe.py": {
        "    unverified: Count = 16\n": (
            '\n\nclass Repeat(Section, frozen=True):\n    """The last token once more."""\n\n    times: Count = 2\n'
        ),
        "    synera: Synera = Synera(confidence=0.8)\n": "    repeat: Repeat = Repeat()\n",
    },
    "device/drafters/repeat.py": {
        "": "from hyco_export.device.drafters.drafter import Draft, NullDrafter\n"
        "from hyco_export.protocol.tree import Source, Tree\n\n\n"
        "class RepeatDrafter(NullDrafter):\n    def __init__(self, times):\n        self._times = times\n\n"
        "    def propose(self, ids):\n        n = self._times\n"
        "        return Draft(Tree((ids[-1],) * n, tuple(range(-1, n - 1)), (0.0,) * n, (Source.SLM,) * n))\n\n\n"
        "def make_repeat(device, settings):\n    return RepeatDrafter(settings.drafting.repeat.times)\n"
    },
    "device/systems.py": {
        "DRAFTERS: dict[str, DrafterRow] = {\n": (
            '    "repeat": DrafterRow(Deferred("hyco_export.device.drafters.repeat:make_repeat")),\n'
        ),
        '        System("plain", "the verifier alone, one token a round", NOTHING, "exact"),\n': (
            '        System("repeat", "the last token again", "repeat", "exact"),\n'
        ),
    },
}


def test_a_drafter_with_an_option_takes_three_files(tmp_path: Path) -> None:
    assert len(DRAFTER) == 3
    copy = Copy(tmp_path, DRAFTER)
    recipe = copy.recipe("\n  budget:", "\n  repeat: {times: 3}\n  budget:")
    copy.script(
        "from types import SimpleNamespace\n"
        "from pathlib import Path\n"
        "from hyco_export.core.recipe_loading import load_recipe\n"
        "from hyco_export.device.systems import find_system, make_drafter\n"
        "from hyco_export.evaluate.runs import run_settings\n"
        f"recipe = load_recipe(Path({recipe!r}))\n"
        "settings = run_settings(recipe, '', SimpleNamespace(vocab_size=9, stop_ids=[1], rows_ms=[]))\n"
        "drafter = make_drafter(find_system('repeat'), settings, object())\n"
        "assert drafter.propose([4, 7]).tree.tokens == (7, 7, 7)"
    )
    listed = copy.python("-m", "hyco_export", "bench", "--systems", "plain,none")
    assert "repeat (the last token again)" in " ".join(listed.stderr.split())


STAGE = {
    "core/recipe.py": {
        "NAME_LIMIT = 100  # of a folder's name of at most 255 bytes, the rest for what is added to it\n": (
            '\n\nclass Tally(Section, frozen=True):\n    """Counting."""\n\n    up_to: Count = 10\n'
        ),
        "    drafting: Drafting = Drafting()\n": "    tally: Tally = Tally()\n",
    },
    "stages/table.py": {
        "# in the order of the chain\n": (
            "TALLY_STAGE = Stage(\n"
            '    name="tally",\n    summary="Write so many letters.",\n    revision=1,\n    needs=(),\n'
            "    config=lambda recipe: recipe.tally,\n    sources=no_sources,\n"
            '    build=Deferred("hyco_export.stages.tally:build"),\n)\n'
        ),
        "STAGES = (CAPTURE_STAGE, QAT_HEAD_STAGE, BUILD_KEEPSET_STAGE, ": "TALLY_STAGE, ",
    },
    "stages/tally.py": {
        "": "def build(config, inputs, out_dir, progress):\n"
        '    (out_dir / "tally.txt").write_text("x" * config.up_to)\n    return {"letters": config.up_to}\n'
    },
}


def test_a_stage_takes_three_files(tmp_path: Path) -> None:
    assert len(STAGE) == 3
    copy = Copy(tmp_path, STAGE)
    assert "Write so many letters." in copy.command("--help")
    recipe = copy.recipe("\nsampling:", "\ntally: {up_to: 3}\n\nsampling:")
    said = copy.command("tally", recipe, "--run", str(tmp_path / "run"))
    assert "letters" in said and "next: " in said
    assert (tmp_path / "run" / "tally" / "tally.txt").read_text() == "xxx"


GRID = {
    "core/recipe.py": {'    grid: Literal["per-channel", "lpbq"': ', "lpbq-32"'},
    "models/head/quantisers.py": {'GRID_BLOCKS: Mapping[str, int | None] = {"per-channel": None, ': '"lpbq-32": 32, '},
}


def test_a_grid_takes_at_most_four_files(tmp_path: Path) -> None:
    assert len(GRID) <= 4  # a size of blocks; another arithmetic also adds to `models.weight_rounding`, and its rule
    copy = Copy(tmp_path, GRID)
    recipe = copy.recipe("  grid: per-channel", "  grid: lpbq-32")
    copy.script(
        "from pathlib import Path\n"
        "import numpy as np, torch\n"
        "from hyco_export.core.recipe_loading import load_recipe\n"
        "from hyco_export.models.head.quantisers import layer_grids, searched_on\n"
        f"qat = load_recipe(Path({recipe!r})).qat\n"
        "weights = {'lm_head': torch.randn(4, 96)}\n"
        "grids = layer_grids({'lm_head': 96}, qat)\n"
        "assert searched_on(weights, grids, np.ones(1))['lm_head'].multipliers.shape == (4, 3)"
    )
