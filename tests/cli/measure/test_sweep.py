"""`sweep`: which points share artifacts, what is linked instead of built, and the plan that a dry run prints."""

import json
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.measure import sweep as command
from hyco_export.cli.measure.sweep import SweepOptions, grouped, sweep_run, told
from hyco_export.core.artifact import Manifest, content_digest, publish
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.grid import Grid, points_of, runs_of
from hyco_export.protocol.wire import Evidence
from hyco_export.stages.plan import PlannedStage
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.table import stages_of
from tests.evaluate.synthetic_run import KEEPSET
from tests.evaluate.synthetic_traces import generation, round_trace

RECIPE = load_recipe(embedded_recipe())


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder whose every artifact is one small file; keys are those of the stages' configurations alone."""
    monkeypatch.setattr(command, "plan", planned)
    run = RunFolder(tmp_path / "run", RECIPE, None)
    run.root.mkdir()
    for item in planned(run, stages_of(RECIPE)):
        build = tmp_path / f"build-{item.stage.name}"
        build.mkdir()
        (build / "part").write_text(item.stage.name)
        publish(build, item.folder, Manifest(item.stage.name, 1, item.key, {}, {}, {}, {}, {}, {}, 0.1))
    return run


def planned(run: RunFolder, stages) -> list[PlannedStage]:
    """Keys without sources: nothing is hashed."""
    keys: dict[str, str] = {}
    found = []
    for stage in stages:
        keys[stage.name] = content_digest([stage.config(run.recipe), [keys[need] for need in stage.needs]])
        folder = run.folder(stage)
        there = folder.is_dir() and command.read_manifest(folder).key == keys[stage.name]
        found.append(PlannedStage(stage, folder, keys[stage.name], {}, {}, "" if there else "not built yet"))
    return found


def groups_of(base: RunFolder, out: Path, **fields):
    return grouped(base, runs_of(points_of(Grid(**fields), RECIPE)), out)


def test_points_share_artifacts_whose_keys_are_the_same(
    base: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    fields = {"drafting.budget": [8, 32], "head.runner_up_steps": [0, 2], "validation.epsilon": [0.01, 0.1]}
    asked: list[Path] = []
    monkeypatch.setattr(command, "plan", lambda run, stages: asked.append(run.root) or planned(run, stages))
    groups = groups_of(base, out, fields=fields)
    assert len(asked) == 4  # a plan reads every artifact: the run's own, both sets, and where the new one will lie
    assert len(groups) == 2
    other, own = groups
    assert own.folder.root == base.root
    assert other.folder.root.parent == out
    assert [len(group.runs) for group in groups] == [2, 2]
    first, second = told(groups, [base])
    assert first.endswith("builds convert-head, compile; 2 runs, 2 more replayed")
    assert second == f"{base.root}: every artifact is there; 2 runs, 2 more replayed"


def test_artifacts_of_the_same_key_are_linked_and_the_rest_is_built(
    base: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr("hyco_export.stages.runner.build_all", lambda run, stages, progress: built.append(run.root))
    other, own = groups_of(base, tmp_path / "sweep", fields={"head.runner_up_steps": [0, 2]})
    for group in (other, own):
        command._build(group, [base, other.folder, own.folder])
    assert built == [other.folder.root]
    linked = sorted(path.name for path in other.folder.root.iterdir())
    assert linked == ["build-keepset", "capture", "convert-slm", "qat-head"]
    for name in linked:
        assert os.path.samefile(base.root / name / "part", other.folder.root / name / "part")


def test_a_recipe_for_the_groups_server_names_whole_paths(base: RunFolder, tmp_path: Path) -> None:
    prompts = tmp_path / "mine" / "prompts.jsonl"
    prompts.parent.mkdir()
    prompts.touch()
    data = msgspec.structs.replace(RECIPE.data, validation="prompts.jsonl")
    beside = command._with_whole_paths(msgspec.structs.replace(RECIPE, data=data), prompts.parent)
    assert beside.data.validation == str(prompts)
    assert Path(str(beside.data.calibration)).is_absolute()
    assert Path(beside.models.verifier.model).is_absolute()
    assert isinstance(beside, Recipe)
    assert beside.drafting == RECIPE.drafting


def test_every_run_of_a_recipe_elsewhere_finds_what_lies_beside_it(
    base: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative model paths mean files beside the recipe, whatever the working folder is."""
    beside = tmp_path / "mine"
    (beside / "checkpoint").mkdir(parents=True)
    verifier = msgspec.structs.replace(RECIPE.models.verifier, model="checkpoint")
    recipe = msgspec.structs.replace(RECIPE, models=msgspec.structs.replace(RECIPE.models, verifier=verifier))
    found: list[str] = []

    def measured(own: RunFolder) -> None:
        found.append(str(own.source("verifier", own.recipe.models.verifier)))
        raise InterruptedError

    monkeypatch.chdir(base.root)
    monkeypatch.setattr(command, "subject_of", measured)
    monkeypatch.setattr(command, "transport_to", lambda *given: (None, None))
    monkeypatch.setattr("hyco_export.stages.run_folder.checkpoint_folder", lambda one, at: Path(one.model).resolve())
    grid = Grid(fields={"drafting.budget": [8, 32]})
    groups = grouped(RunFolder(base.root, recipe, beside), runs_of(points_of(grid, recipe)), tmp_path / "out")
    server = SimpleNamespace(url="http://127.0.0.1:1", require_running=None)
    for group in groups:
        for run in group.runs:
            with pytest.raises(InterruptedError):
                command._generations(run, grid, group, server, tmp_path / "out", ConnectOptions())
    assert found == [str(beside / "checkpoint")] * 2


def test_generations_come_back_with_what_a_replay_needs(
    base: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store keeps p~ in its files alone; points of other rules are judged by it."""
    drawn = generation(round_trace((0,), evidence=Evidence([2], [-1], [2, 3], [0.5], [0.5], [0.1, 0.2])))
    connection = SimpleNamespace(tokenizer=None, info=None, artifacts=SimpleNamespace(keepset=KEEPSET))
    monkeypatch.setattr(command, "transport_to", lambda *given: (None, None))
    monkeypatch.setattr(command, "subject_of", lambda own: SimpleNamespace(prompts=()))
    monkeypatch.setattr(command, "bench_plan", lambda *given: Plan(("hyco",)))
    monkeypatch.setattr("hyco_export.evaluate.connect.connect", lambda *given: connection)
    monkeypatch.setattr("hyco_export.evaluate.connect.read_prompts", lambda *given: ())
    monkeypatch.setattr("hyco_export.evaluate.runs.DeviceRunner", lambda *given, **more: nullcontext())
    monkeypatch.setattr(
        "hyco_export.evaluate.bench.run_bench", lambda plan, runner, prompts, store, on_step: store.add(drawn)
    )
    (group,) = groups_of(base, tmp_path / "out", fields={"validation.epsilon": [0.01, 0.1]})
    grid, server = Grid(), SimpleNamespace(url="http://127.0.0.1:1", require_running=None)
    traces, _ = command._generations(group.runs[0], grid, group, server, tmp_path / "out", ConnectOptions())
    assert [record.evidence for trace in traces for record in trace.rounds] == [drawn.rounds[0].evidence]


class Plan(msgspec.Struct):
    """As much of a benchmark's plan as the store reads."""

    systems: tuple[str, ...]


def test_a_dry_run_says_the_plan_and_builds_nothing(
    base: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("fields: {keepset.size: [1200, 1536]}\n")
    options = SweepOptions(grid, tmp_path / "out", None, "judge", True)
    sweep_run(None, base.root, None, options, ConnectOptions())
    shown = capsys.readouterr().out
    assert "builds build-keepset, convert-head, convert-slm, compile; 1 run" in shown
    assert f"{base.root}: every artifact is there; 1 run" in shown
    assert shown.splitlines()[-1].endswith(f" sweep {grid}")
    assert not (tmp_path / "out").exists()


def test_a_sweep_leaves_table_and_picture(
    base: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations are scripted: one server for one set of artifacts, the baseline once, a run for each budget."""
    made, served = [], []

    def generations(run, grid, group, server, out, reach):
        made.append((run.system, run.recipe.drafting.budget))
        accepted = (0, 1, 2) if run.recipe.drafting.budget == 32 else (0,)
        server_ms = 9.0 if run.system == "cloud-mtp" else 3.0
        return [generation(round_trace(accepted, server_ms=server_ms), system=run.system)], KEEPSET

    @contextmanager
    def server_process(recipe_file: Path, root: Path):
        served.append(load_recipe(recipe_file).name)
        yield None

    monkeypatch.setattr(command, "_generations", generations)
    monkeypatch.setattr(command, "server_process", server_process)
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    grid.write_text("fields: {drafting.budget: [8, 32]}\n")
    sweep_run(None, base.root, None, SweepOptions(grid, out, None, "judge", False), ConnectOptions())
    assert made == [("cloud-mtp", 8), ("hyco", 8), ("hyco", 32)]
    assert served == ["tiny"]
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    assert [(row["mat"], row["dominated"]) for row in rows] == [(2.0, True), (4.0, False)]
    assert (out / "sweep.csv").read_text().splitlines()[0].startswith("number,drafting.budget,system,rule,mat")
    assert "<svg" in (out / "sweep.svg").read_text()
    shown = capsys.readouterr().out
    assert "2 points of tiny, change against cloud-mtp" in shown
    assert shown.splitlines()[-1].endswith(f" {out / rows[1]['traces']}")


def test_what_cannot_work_is_said_before_anything_is_done(base: RunFolder, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    for text, message in (
        ("fields: {drafting.budget: [8]}\nbackend: gpu", "gpu"),
        ("fields: {drafting.budget: [0]}", r"\$.drafting.budget"),
    ):
        grid.write_text(text)
        with pytest.raises(HycoError, match=message):
            sweep_run(
                None, base.root, None, SweepOptions(grid, tmp_path / "out", None, "judge", False), ConnectOptions()
            )
    grid.write_text("fields: {drafting.budget: [8]}")
    with pytest.raises(HycoError, match="is no summary"):
        options = SweepOptions(grid, tmp_path / "out", tmp_path, "judge", False)
        sweep_run(None, base.root, None, options, ConnectOptions())
    assert not (tmp_path / "out").exists()
