"""The runner: reuse, staleness, interruption, locks; with small stages whose work is a text file."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.artifact import PartialBuild, verify
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import ArtifactError, RecipeError, StorageError
from hyco_export.stages.declarations import Silent, Stage
from hyco_export.stages.plan import plan, require_current
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import BUILD_FOLDER, build_all
from hyco_export.stages.table import chain_to


class Size(msgspec.Struct, frozen=True):
    steps: int


def steps(recipe: Recipe) -> Size:
    return Size(recipe.qat.steps)


class Recorder(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def stages(source: Path, revision: int = 1) -> list[Stage]:
    """a reads the source; b reads a; c reads a and is built once per target."""

    def build_a(config, inputs, out_dir, progress):
        (out_dir / "a.txt").write_text(inputs["text"].read_text() * config.steps)
        return {"length": config.steps}

    def build_next(config, inputs, out_dir, progress):
        (out_dir / "next.txt").write_text((inputs["a"] / "a.txt").read_text())
        return {}

    return [
        Stage("a", revision, (), steps, lambda recipe: {"text": str(source)}, build_a),
        Stage("b", 1, ("a",), steps, lambda recipe: {}, build_next),
        Stage("c", 1, ("a",), steps, lambda recipe: {}, build_next, per_target=True),
    ]


def test_a_run_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = RunFolder(tmp_path / "file" / "run", load_recipe(embedded_recipe()), None)
    with pytest.raises(StorageError, match=r"file/run cannot be made or written: Not a directory \(.*--run\)"):
        build_all(run, stages(source), Silent())


def run_folder(tmp_path: Path, **qat: int) -> RunFolder:
    recipe = load_recipe(embedded_recipe())
    recipe = msgspec.structs.replace(recipe, qat=msgspec.structs.replace(recipe.qat, **qat))
    return RunFolder(tmp_path / "run", recipe, None)


def built_now(run: RunFolder, table: list[Stage]) -> list[str]:
    recorder = Recorder()
    build_all(run, table, recorder)
    return [note.split()[1].rstrip(":") for note in recorder.notes if not note.endswith("fresh")]


def test_a_second_run_builds_nothing(tmp_path: Path, source: Path) -> None:
    run, table = run_folder(tmp_path), stages(source)
    assert built_now(run, table) == ["a", "b", "c"]
    assert built_now(run, table) == []
    assert sorted(p.name for p in run.root.iterdir()) == [".lock", "a", "b", "c@sm8850"]


def test_changed_config_source_code_or_bytes_build_again(tmp_path: Path, source: Path) -> None:
    table = stages(source)
    build_all(run_folder(tmp_path), table, Silent())
    assert built_now(run_folder(tmp_path, steps=7), table) == ["a", "b", "c"]
    source.write_text("y")
    assert built_now(run_folder(tmp_path, steps=7), table) == ["a", "b", "c"]
    assert built_now(run_folder(tmp_path, steps=7), stages(source, revision=2)) == ["a", "b", "c"]
    (tmp_path / "run" / "b" / "next.txt").write_text("damaged")
    assert built_now(run_folder(tmp_path, steps=7), stages(source, revision=2)) == ["b"]


def test_a_file_of_somebody_else_is_named_by_run_and_validate_and_nothing_is_built_again(
    tmp_path: Path, source: Path
) -> None:
    run, table = run_folder(tmp_path), stages(source)
    build_all(run, table, Silent())
    (run.root / "a" / ".DS_Store").write_text("x")
    assert built_now(run, table) == []
    (run.root / "a" / "notes.md").write_text("x")
    for check in (plan, require_current):
        with pytest.raises(ArtifactError, match=r"a/notes.md is not in the manifest \(move or remove it"):
            check(run, table)
    with pytest.raises(ArtifactError, match=r"a/notes.md"):
        build_all(run, table, Silent())
    (run.root / "a" / "notes.md").unlink()
    require_current(run, table)


def test_chain_to_takes_only_what_is_needed(source: Path) -> None:
    assert [stage.name for stage in chain_to(stages(source), "c")] == ["a", "c"]


def test_a_failing_stage_leaves_no_artifact_and_keeps_the_finished_ones(tmp_path: Path, source: Path) -> None:
    def fail(config, inputs, out_dir, progress):
        (out_dir / "half.txt").write_text("half")
        raise RuntimeError("out of memory")

    run, table = run_folder(tmp_path), stages(source)
    broken = [table[0], Stage("b", 1, ("a",), steps, lambda recipe: {}, fail)]
    with pytest.raises(RuntimeError):
        build_all(run, broken, Silent())
    assert (run.root / "a").exists()
    assert not (run.root / "b").exists()
    assert built_now(run, table) == ["b", "c"]


def test_a_full_disk_under_a_stage_is_named_and_loses_nothing(tmp_path: Path, source: Path) -> None:
    def write(config, inputs, out_dir, progress):
        (out_dir / "full").symlink_to("/dev/full")
        (out_dir / "full").write_text("text")

    run, table = run_folder(tmp_path), stages(source)
    full = [table[0], Stage("b", 1, ("a",), steps, lambda recipe: {}, write)]
    with pytest.raises(StorageError, match=r"\.build/b-.*: No space left on device \(make room") as caught:
        build_all(run, full, Silent())
    assert caught.value.exit_code == 2
    assert built_now(run, table) == ["b", "c"]


def test_no_room_for_the_manifest_loses_no_finished_unit(tmp_path: Path, monkeypatch) -> None:
    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run, work = run_folder(tmp_path), []
    monkeypatch.setattr("hyco_export.core.artifact.write_json", full)
    with pytest.raises(StorageError, match=r"manifest\.json: No space left on device"):
        build_all(run, [resumable(-1, work)], Silent())
    assert work == [0, 1, 2]
    monkeypatch.undo()
    build_all(run, [resumable(-1, work)], Silent())
    assert work == [0, 1, 2]
    assert sorted(verify(run.root / "r").files) == [f"unit-{unit}.txt" for unit in range(3)]


def test_fresh_stages_are_reused_where_nothing_can_be_written(tmp_path: Path, source: Path, monkeypatch) -> None:
    run, table = run_folder(tmp_path), stages(source)
    build_all(run, table, Silent())
    monkeypatch.setattr("hyco_export.stages.run_folder.os.access", lambda path, mode: False)
    (run.root / ".lock").unlink()
    (run.root / ".lock").mkdir()  # root may write anywhere: a lock that cannot be opened stands for the rest
    assert sorted(build_all(run, table, Silent())) == ["a", "b", "c"]
    (run.root / "c@sm8850" / "next.txt").write_text("damaged")
    with pytest.raises(StorageError, match="cannot be made or written"):
        build_all(run, table, Silent())


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    table = stages(tmp_path / "nowhere" / "deep" / "missing.txt")
    with pytest.raises(RecipeError, match=r"\$.data.text: .*missing\.txt does not exist"):
        plan(run_folder(tmp_path), table)


def test_two_processes_cannot_build_in_one_folder(tmp_path: Path, source: Path) -> None:
    run = run_folder(tmp_path)
    other = run_folder(tmp_path)
    with run.lock(), pytest.raises(ArtifactError, match="another process is building or validating in"):
        build_all(other, stages(source), Silent())


KILLED_BUILD = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from tests.stages.test_runner import run_folder, stages, steps
    from hyco_export.stages.runner import build_all
    from hyco_export.stages.declarations import Silent, Stage

    def die(config, inputs, out_dir, progress):
        (out_dir / "half.txt").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    table = stages(Path({source!r}))
    build_all(run_folder(Path({root!r})), [table[0], Stage("b", 1, ("a",), steps, lambda r: {{}}, die)], Silent())
"""


def test_a_killed_run_loses_only_the_stage_in_flight(tmp_path: Path, source: Path) -> None:
    script = textwrap.dedent(KILLED_BUILD).format(
        tests=str(Path(__file__).parents[2]), source=str(source), root=str(tmp_path)
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    run = run_folder(tmp_path)
    assert [path.name for path in (run.root / BUILD_FOLDER).glob("b-*/half.txt")] == ["half.txt"]
    assert not (run.root / "b").exists()
    assert built_now(run, stages(source)) == ["b", "c"]
    assert sorted(verify(run.root / "b").files) == ["next.txt"]
    assert not (run.root / BUILD_FOLDER).exists()


class Interrupted(Exception):
    pass


def resumable(stop_after: int, work: list[int]) -> Stage:
    """Three units of a line each; raises before unit `stop_after` and notes in `work` which units it does."""

    def build(config, inputs, out_dir, progress):
        partial = PartialBuild(out_dir)
        for unit in range(3):
            if partial.finished(str(unit)):
                continue
            if unit == stop_after:
                raise Interrupted
            work.append(unit)
            with partial.place(f"unit-{unit}.txt") as draft:
                draft.write_text(f"{config.steps} {unit}")
            partial.finish(str(unit), [f"unit-{unit}.txt"])
        return {}

    return Stage("r", 1, (), steps, lambda recipe: {}, build, resumable=True)


def stopped(run: RunFolder, stop_after: int) -> list[int]:
    work: list[int] = []
    with pytest.raises(Interrupted):
        build_all(run, [resumable(stop_after, work)], Silent())
    return work


def test_a_resumable_stage_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run, work = run_folder(tmp_path), []
    assert stopped(run, 1) == [0]
    assert stopped(run, 2) == [1]
    build_all(run, [resumable(-1, work)], Silent())
    assert work == [2]
    assert sorted(verify(run.root / "r").files) == [f"unit-{unit}.txt" for unit in range(3)]
    assert not (run.root / BUILD_FOLDER).exists()


def test_units_of_another_key_are_not_continued(tmp_path: Path) -> None:
    stopped(run_folder(tmp_path, steps=3), 2)
    work: list[int] = []
    build_all(run_folder(tmp_path, steps=5), [resumable(-1, work)], Silent())
    assert work == [0, 1, 2]
    assert not (tmp_path / "run" / BUILD_FOLDER).exists()


def test_units_made_with_other_libraries_are_not_continued(tmp_path: Path) -> None:
    run, work = run_folder(tmp_path), []
    stopped(run, 2)
    build_all(run, [dataclasses.replace(resumable(-1, work), libraries=("torch",))], Silent())
    assert work == [0, 1, 2]


def test_a_damaged_unit_is_done_again(tmp_path: Path) -> None:
    run, work = run_folder(tmp_path), []
    stopped(run, 2)
    (path,) = (run.root / BUILD_FOLDER).glob("r-*/unit-1.txt")
    path.write_text("damaged")
    build_all(run, [resumable(-1, work)], Silent())
    assert work == [1, 2]


def test_a_build_that_was_complete_but_not_renamed_is_published(tmp_path: Path) -> None:
    run, work = run_folder(tmp_path), []
    stopped(run, 2)
    (folder,) = (run.root / BUILD_FOLDER).glob("r-*")
    (folder / "manifest.json").write_text("{}")
    build_all(run, [resumable(-1, work)], Silent())
    assert sorted(verify(run.root / "r").files) == [f"unit-{unit}.txt" for unit in range(3)]


def test_another_stage_leaves_what_a_resumable_one_has_done(tmp_path: Path, source: Path) -> None:
    run, work = run_folder(tmp_path), []
    stopped(run, 2)
    build_all(run, stages(source), Silent())
    build_all(run, [resumable(-1, work)], Silent())
    assert work == [2]


def test_an_interrupt_carries_what_there_is_of_the_plan(source: Path, tmp_path: Path) -> None:
    """Artifacts by name, those that were fresh before too, and units of a stage that can go on."""

    def stopped(chain: list[Stage]) -> list[str]:
        with pytest.raises(KeyboardInterrupt) as stop:
            build_all(run, chain, Silent())
        return getattr(stop.value, "__notes__", [])

    def stop(config, inputs, out_dir, progress):
        if parts:
            (out_dir / "part.txt").write_text("part")
            PartialBuild(out_dir).finish("part", ["part.txt"])
        raise KeyboardInterrupt

    parts: list[str] = []
    run = RunFolder(tmp_path / "run", load_recipe(embedded_recipe()), None)
    a, b, _ = stages(source)
    assert stopped([with_build(a, stop)]) == [""]
    assert stopped([a, with_build(b, stop)]) == [f"a in {run.root}"]
    assert stopped([a, with_build(b, stop)]) == [f"a in {run.root}"]
    parts.append("some")
    assert stopped([a, with_build(b, stop)]) == [f"a, what is done of b in {run.root}"]


def with_build(stage: Stage, build) -> Stage:
    return dataclasses.replace(stage, build=build, resumable=True)


def other_libraries(run: RunFolder, name: str) -> None:
    """Let an artifact's manifest say that it was built with another torch."""
    path = run.root / name / "manifest.json"
    content = msgspec.json.decode(path.read_bytes())
    content["versions"]["torch"] = "0.1"
    path.write_bytes(msgspec.json.encode(content))


def test_rebuild_ends_where_the_bytes_are_the_same(tmp_path: Path, source: Path) -> None:
    run, table, recorder = run_folder(tmp_path), stages(source), Recorder()
    build_all(run, table, Silent())
    other_libraries(run, "a")
    assert [item.waits for item in plan(run, table, rebuild=True)] == [False, True, True]
    build_all(run, table, recorder, rebuild=True)
    assert recorder.notes[0].startswith("[1/3] a: built with torch 0.1, now ")
    kept = "fresh, what it is made from has the bytes that it had"
    assert recorder.notes[1:] == [f"[2/3] b: {kept}", f"[3/3] c: {kept}"]
    assert [item.remark for item in plan(run, table)] == ["", "", ""]


def test_what_was_made_of_other_bytes_is_built_also_after_an_interruption(tmp_path: Path, source: Path) -> None:
    """The key of the input says nothing: the same code with other libraries made other bytes."""

    def newer(config, inputs, out_dir, progress):
        (out_dir / "a.txt").write_text("as the newer library writes it")
        return {}

    run, table = run_folder(tmp_path), stages(source)
    build_all(run, table, Silent())
    other_libraries(run, "a")
    upgraded = [dataclasses.replace(table[0], build=newer), *table[1:]]
    build_all(run, upgraded[:1], Silent(), rebuild=True)  # and no further
    assert [item.reason for item in plan(run, upgraded)] == ["", *2 * ["input a was rebuilt"]]
    assert built_now(run, upgraded) == ["b", "c"]
    assert (run.root / "b" / "next.txt").read_text() == "as the newer library writes it"
