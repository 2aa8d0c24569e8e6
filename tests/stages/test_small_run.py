"""A short run of the whole chain on the embedded family: every field of a configuration is read, and what a changed
field leaves alone is taken over byte by byte."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hyco_export.core.artifact import file_digest, read_manifest
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.core.recipe_sections import DataSource
from hyco_export.core.targets import Target
from hyco_export.stages.declarations import Silent, Stage
from hyco_export.stages.plan import plan
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import COMPILE_STAGE, STAGES
from tests.stages.test_changed_fields import changed

pytestmark = pytest.mark.slow
UNREAD = {  # by stage: fields that this recipe's values leave aside, and what reads them
    "build-keepset": {"coverage"},  # where there is no size
    "compile": {"target", "c_compiler"},  # handed on whole to the compiler's process; where 2-bit weights are wanted
}


class Recording:
    """A configuration that notes which of its fields are read; sections inside it do the same."""

    def __init__(self, real: msgspec.Struct, read: set[str], places: dict[int, str]) -> None:
        self.__dict__.update(_real=real, _read=read, _places=places)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name not in self._real.__struct_fields__:  # a property that gives a section
            return value
        path = f"{self._places[id(self._real)]}{name}"
        self._read.add(path)
        if isinstance(value, msgspec.Struct) and not isinstance(value, Target):
            self._places[id(value)] = f"{path}."
            return Recording(value, self._read, self._places)
        return value


@dataclass
class Run:
    """The run folder, and the fields that each stage read."""

    folder: RunFolder
    read: dict[str, set[str]] = field(default_factory=dict)


def leaves(config: msgspec.Struct, place: str = "") -> Iterator[str]:
    """Fields that hold no section."""
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{place}{name}.")
        elif value is not msgspec.UNSET:
            yield f"{place}{name}"


def recorded(stage: Stage, read: dict[str, set[str]]) -> Stage:
    fields = read.setdefault(stage.name, set())

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda config, *rest: call(Recording(config, fields, {id(config): ""}), *rest)

    return replace(stage, build=wrapped(stage.build), check=wrapped(stage.check))


def small_recipe() -> Recipe:
    """Few prompts, steps and samples; nothing is gated that so little training could not keep."""
    recipe = load_recipe(embedded_recipe())
    values = {
        "data.calibration": DataSource(path=recipe.data.calibration, limit=4),
        "data.validation": DataSource(path=recipe.data.validation, limit=3),
        "data.conversations": DataSource(path=recipe.data.conversations, limit=200),
        "capture.sampled_answers": 1,
        "qat.steps": 2,
        "qat.evidence_sequences": 1,
        "keepset.size": 1000,
        "slm.evidence_passes": 1,
        "calibration.slm_quality_passes": 2,
        "compile.emulated_feeds": 1,
        "compile.max_outside_share": 1.0,
        "compile.min_id_agreement": 0.0,
        "validation.prompts": 3,
    }
    for path, value in values.items():
        recipe = changed(recipe, path, value)
    return recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    built = Run(RunFolder(tmp_path_factory.mktemp("small") / "run", small_recipe(), None))
    build_all(built.folder, [recorded(stage, built.read) for stage in STAGES], Silent())
    return built


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_reads_every_field_of_its_configuration(run: Run, stage: Stage) -> None:
    aside = UNREAD.get(stage.name, set())
    asked = {path for path in leaves(stage.config(run.folder.recipe)) if path.partition(".")[0] not in aside}
    assert asked and asked <= run.read[stage.name], sorted(asked - run.read[stage.name])


def binaries(folder: Path) -> dict[str, str]:
    found = {path.name: file_digest(path) for path in folder.glob("*_ctx*")}
    assert len(found) == 6
    return found


def stale(run: RunFolder) -> list[str]:
    return [item.stage.name for item in plan(run, STAGES) if not item.fresh]


def test_a_learning_rate_compiles_the_head_alone_and_rows_of_prefill_that_graph_alone(run: Run) -> None:
    folder = run.folder.folder(COMPILE_STAGE)
    before, reports = binaries(folder), (folder / "parity.json").read_bytes()
    recipe = changed(run.folder.recipe, "qat.learning_rate", 3e-2)
    again = RunFolder(run.folder.root, recipe, None)
    assert [item.stage.name for item in plan(again, STAGES) if not item.fresh] == [
        "qat-head",
        "convert-head",
        "compile",
    ]
    build_all(again, STAGES, Silent())
    made = read_manifest(folder).metrics["graphs"]
    assert {name: one["binary"] for name, one in made.items()} == {
        "head": "compiled",
        "slm_tree": "taken over",
        "slm_prefill": "taken over",
    }
    after = binaries(folder)
    assert {name for name in after if after[name] != before[name]} == {"head_ctx_qnn.bin"}
    kept = [msgspec.json.decode(text) for text in (reports, (folder / "parity.json").read_bytes())]
    assert [kept[0][name] == kept[1][name] for name in ("slm_tree", "slm_prefill")] == [True, True]

    third = RunFolder(run.folder.root, changed(recipe, "slm.prefill_rows", 16), None)
    assert stale(third) == ["convert-slm", "compile"]
    build_all(third, STAGES, Silent())
    made = read_manifest(folder).metrics["graphs"]
    assert [name for name, one in made.items() if one["binary"] == "compiled"] == ["slm_prefill"]
    last = binaries(folder)
    assert {name for name in last if last[name] != after[name]} <= {"slm_prefill_ctx_qnn.bin", "slm_prefill_ctx.onnx"}
