"""Another compiler makes an artifact of its own beside the run's, once; AI Hub's whole flow on a fake of it."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from hyco_export.cli import cloud
from hyco_export.cli.cloud import CompilerOptions, profile_run
from hyco_export.core.artifact import Manifest, file_digest, publish, verify
from hyco_export.core.device_profile import graphs_key, read_profile
from hyco_export.core.device_spec import SlmSpec
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.recipe import CompileGates
from hyco_export.core.recipe_loading import load_recipe, shipped_recipes
from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError, HycoError
from hyco_export.graph import qairt_wheel
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qnn import compile_context
from hyco_export.stages.compile_elsewhere import Compiler, compile_elsewhere, graphs_of, with_wheel
from hyco_export.stages.declarations import Silent
from hyco_export.stages.run_folder import RunFolder
from tests.support.fake_hub import TOKEN, FakeHub, quota
from tests.support.qdq_builder import two_layer_mlp

RECIPE = "gemma3-270m-sm8850"  # an SLM alone
INSTALLED = "installed"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Converted graphs of an SLM alone."""
    root = tmp_path / "run"
    build = root / ".build"
    build.mkdir(parents=True)
    specs = []
    for seed, name in enumerate(("slm_tree", "slm_prefill")):
        path = two_layer_mlp(seed=seed).save(build / f"{name}.onnx")
        specs.append(read_io_spec(onnx.load(path), name))
    write_json(build / "slm.json", SlmSpec(4, 4, 100, "k", 32, 0, {}, {}, {}, (), -100.0, *specs))
    generator = np.random.default_rng(0)
    feeds = [{"x": generator.integers(0, 65536, (4, 32)).astype(np.uint16)} for _ in range(3)]
    write_samples(build / "slm_samples.safetensors", {"slm_tree": feeds, "slm_prefill": feeds})
    publish(build, root / "convert-slm", Manifest("convert-slm", 1, "k1", {}, {}, {}, {}, {}, {}, 0.1))
    return RunFolder(root, load_recipe(shipped_recipes()[RECIPE]), None)


def own_artifact(run: RunFolder) -> Path:
    """The run's own compiled graphs."""
    build, folder = run.root / ".compile", run.root / "compile@sm8850"
    build.mkdir()
    for graph in graphs_of(run):
        compile_context(graph.model, build, graph.spec.name, TARGETS["sm8850"], run.root / "log")
    publish(build, folder, Manifest("compile", 1, "c", {}, {"convert-slm": "k1"}, {}, {}, {}, {}, 0.1))
    return folder


def phone(run: RunFolder, **options) -> FakeHub:
    """Computes as the integer graphs do."""

    def compute(pair: Path, inputs):
        name = next(pair.glob("*.onnx")).name.removesuffix("_ctx.onnx")
        session = ReferenceSession(run.root / "convert-slm" / f"{name}.onnx")
        results = [session.run({"x": x}) for x in inputs["x"]]
        return {key: [result[key] for result in results] for key in results[0]}

    folder = run.root / ".hub"
    folder.mkdir(exist_ok=True)
    return FakeHub(compute, folder=folder, **options)


def test_a_wheels_artifact_stands_beside_the_runs_own_and_is_reused(run: RunFolder) -> None:
    own = own_artifact(run)
    before = {path.name: file_digest(path) for path in own.iterdir()}
    compiler = Compiler("qairt-test", {"onnxruntime-qnn": INSTALLED})
    compile_one = with_wheel(run.root, CompileGates())  # an empty folder in front: the installed wheel is used
    folder = compile_elsewhere(run, compiler, compile_one, Silent())
    assert folder == run.root / "qairt-test" / "compile@sm8850"
    manifest = verify(folder)
    assert manifest.inputs == {"convert-slm": "k1"} and set(manifest.metrics["builds"]) == {"slm_tree", "slm_prefill"}
    assert graphs_key(manifest) == graphs_key(verify(own))  # a profile of either is one of these graphs
    assert {path.name: file_digest(path) for path in own.iterdir()} == before
    names = sorted(path.name for path in own.iterdir() if path.suffix == ".bin")
    assert [file_digest(folder / name) for name in names] == [before[name] for name in names]  # the same compiler

    def never(*_):
        raise AssertionError("built again")

    assert compile_elsewhere(run, compiler, never, Silent()) == folder
    other = Compiler("qairt-test", {"onnxruntime-qnn": "other"})
    with pytest.raises(AssertionError, match="built again"):
        compile_elsewhere(run, other, never, Silent())
    assert verify(folder).key == manifest.key  # the old one stays whole
    assert not list(folder.parent.glob(".*"))


def test_options_that_do_not_go_together_are_refused() -> None:
    for options, message in (
        (CompilerOptions(via="genie"), "'genie' is no compiler"),
        (CompilerOptions(via="aihub", wheel="2.6.0"), "two compilers"),
        (CompilerOptions(device="X"), "--device is AI Hub's"),
        (CompilerOptions(qairt="2.50"), "--qairt is AI Hub's"),
    ):
        with pytest.raises(HycoError, match=message):
            options.require_possible()


def test_a_version_is_one_and_what_pip_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("newest", "2.6; rm -rf x", "--pre", "../2.6.0"):
        with pytest.raises(CompileError, match="is no version"):
            qairt_wheel.wheel_folder(text, tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CompileError, match=r"onnxruntime-qnn 99\.0 cannot be installed: .*No matching") as refused:
        qairt_wheel.wheel_folder("99.0", tmp_path)
    assert "\n" not in str(refused.value) and not list(tmp_path.rglob(".install-*"))
    (tmp_path / "onnxruntime-qnn" / "9.9" / "onnxruntime_qnn").mkdir(parents=True)
    folder = qairt_wheel.wheel_folder("9.9", tmp_path)  # installed before
    (folder / "onnxruntime_qnn" / "build_and_package_info.py").write_text("qnn_version = '2.42.0'\n")
    assert qairt_wheel.qairt_version(folder) == "2.42.0"


def test_aihub_compiles_and_profiles_a_run(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    own_artifact(run)
    hub = phone(run)
    compiler, compile_one = cloud._compiler(CompilerOptions(via="aihub", qairt="2.50"), run, lambda: hub)
    folder = compile_elsewhere(run, compiler, compile_one, Silent())
    assert folder == run.root / "aihub-2.50" / "compile@sm8850"
    assert verify(folder).config["compiler"]["QAIRT"] == "2.50"
    for artifact in (None, folder):
        assert profile_run(Path(RECIPE), run.root, None, None, 2, artifact, lambda: hub) == 0
        profile = read_profile(run.root, "sm8850")
        assert profile is not None and profile.device == "Samsung Galaxy S26 Ultra"
        assert {name: graph.npu_ms for name, graph in profile.graphs.items()} == {"slm_tree": 1.5, "slm_prefill": 1.5}
    said = capsys.readouterr().out
    assert "within the limits" in said and "67% of 3" in said and "91.0 MB" in said
    assert "provisioning device" in said and "success" in said
    kept = sorted(str(path.relative_to(run.root)) for path in (run.root / "profile").rglob("*.npz"))
    assert kept == [f"profile/{name}/{number}.npz" for name in ("slm_prefill", "slm_tree") for number in (0, 1)]
    secret = TOKEN.encode()
    assert not [path for path in run.root.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert TOKEN not in said


def test_a_phone_that_computes_something_else_ends_with_1(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    own_artifact(run)
    hub = phone(run)
    exact = hub.compute
    hub.compute = lambda pair, inputs: {
        name: [value ^ np.uint16(1 << 13) for value in values] for name, values in exact(pair, inputs).items()
    }
    assert profile_run(Path(RECIPE), run.root, None, "Snapdragon 8 Elite Gen 5 QRD", 1, None, lambda: hub) == 1
    assert "OUTSIDE: y" in capsys.readouterr().out


def test_a_failing_service_leaves_nothing_behind(run: RunFolder) -> None:
    own_artifact(run)
    for hub, message in (
        (phone(run, raises={"submit_compile_job": quota()}), "takes no more jobs"),
        (phone(run, fails=f"no memory, token={TOKEN}"), "failed: no memory"),
    ):
        compiler, compile_one = cloud._compiler(CompilerOptions(via="aihub"), run, lambda hub=hub: hub)
        with pytest.raises(HycoError, match=message) as refused:
            compile_elsewhere(run, compiler, compile_one, Silent())
        assert TOKEN not in str(refused.value)
        assert not list((run.root / "aihub").rglob("*"))
    with pytest.raises(HycoError, match="failed: no memory"):
        profile_run(Path(RECIPE), run.root, None, None, 1, None, lambda: phone(run, fails="no memory"))
    assert read_profile(run.root, "sm8850") is None


def test_devices_of_known_chips_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    cloud.list_devices(FakeHub)
    said = capsys.readouterr().out
    assert "Samsung Galaxy S25" in said and "sm8750" in said and "Pixel" not in said
