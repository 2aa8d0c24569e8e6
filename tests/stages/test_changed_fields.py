"""One changed field of a recipe: the stages that are built anew, and the graphs that are compiled."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hyco_export.core.artifact import Manifest, content_digest, publish, read_manifest
from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.recipe import CompileGates, Recipe, SlmWeights, TokenBridge
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.core.targets import TARGETS
from hyco_export.graph.qnn import CompiledContext
from hyco_export.graph.qnn_process import ContextInfo, GraphInfo
from hyco_export.models.checkpoints import checkpoint_folder
from hyco_export.stages.declarations import Silent, Stage, no_check
from hyco_export.stages.plan import plan
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import STAGES, stages_of
from tests.stages.test_compile import best_of_mlp, feeds, head_spec, save, slm_spec
from tests.support.qdq_builder import two_layer_mlp

ALL = ("capture", "qat-head", "build-keepset", "convert-head", "convert-slm", "compile")
TRAINED = ("qat-head", "convert-head", "compile")
KEPT = ("build-keepset", "convert-head", "convert-slm", "compile")
HEAD, SLM, BINARIES, NONE = ("convert-head", "compile"), ("convert-slm", "compile"), ("compile",), ()

STALE = {  # field or section -> what is built anew; the longest name counts
    "name": NONE,
    "target": BINARIES,
    "threads": NONE,
    "models.verifier.model": ALL,
    "models.verifier.dtype": ALL,
    "models.verifier.revision": NONE,  # of a Hub id: what it names is known by its contents
    "models.head.model": TRAINED,
    "models.head.dtype": TRAINED,
    "models.head.revision": NONE,
    "models.slm.model": SLM,
    "models.slm.dtype": NONE,  # packed integers have none, and unquantised weights are read in float32
    "models.slm.revision": NONE,
    "models.hidden_norm": ALL,
    "models.allow_quantised_capture": NONE,
    "data.calibration": ALL,
    "data.validation": ALL,
    "data.conversations": KEPT,
    "keepset": KEPT,
    "capture": ALL,
    "qat": TRAINED,
    "head": HEAD,
    "head.steps": TRAINED,
    "head.window": TRAINED,
    "slm": SLM,
    "calibration.activation_percentile": HEAD,
    "calibration.mask_value": ("convert-head", "convert-slm", "compile"),
    "calibration.kv_percentile": SLM,
    "calibration.kv_margin": SLM,
    "calibration.slm_percentile": SLM,
    "calibration.slm_margin": SLM,
    "calibration.slm_passes": SLM,
    "calibration.slm_quality_passes": SLM,
    "compile": BINARIES,
    "sampling": ALL,  # sampled answers, and golden trees
    "drafting": NONE,
    "validation": NONE,
}
TEXT_STALE = {  # of a recipe without a head, where it differs
    "capture.sampled_answers": NONE,
    "models.hidden_norm": NONE,
    "sampling": NONE,
    "calibration.activation_percentile": NONE,
    "head": NONE,
    "qat": NONE,
    "slm.weights": SLM,
}
NO_FILE = "gguf_file"  # names another checkpoint, as `model` does
COPIES = {"models.verifier.model": "verifier", "models.head.model": "head", "models.slm.model": "slm"}
VALUES: dict[str, Any] = {
    "target": "sm8750",
    "slm.weights": SlmWeights(bits=8),
    "slm.bridge": TokenBridge(),
    "slm.stored_opening": True,
    "validation.gates.min_mat": {"hyco": 1.0},
}


def fields(section: msgspec.Struct, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its value; those of a section inside it instead of the section."""
    for name, value in msgspec.structs.asdict(section).items():
        path = f"{place}{name}"
        if isinstance(value, msgspec.Struct):
            yield from fields(value, f"{path}.")
        elif name != NO_FILE:
            yield path, value


def changed(recipe: Recipe, path: str, value: Any) -> Recipe:
    section, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(recipe, section), rest, value)
    return msgspec.structs.replace(recipe, **{section: value})


def another(path: str, value: Any) -> Any:
    """Any other value: plans compare, they do not judge."""
    if path in VALUES:
        return VALUES[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return {"post": "pre", "float32": "bfloat16"}.get(value, f"{value}-other")
    if isinstance(value, tuple):
        return (*value, *value[:1]) or ("v.*",)
    return {"lm_head": 8} if isinstance(value, dict) else 7


def run_of(recipe: Recipe, root: Path) -> RunFolder:
    return RunFolder(root / "run", recipe, None)


def fresh_run(root: Path, recipe: Recipe) -> Recipe:
    """A run folder whose stages are all fresh; each artifact is one file."""
    run = run_of(recipe, root)
    for item in plan(run, stages_of(recipe)):
        folder = run.root / ".build"
        folder.mkdir(parents=True)
        (folder / "made.txt").write_text(item.key)
        config, stage = item.stage.config(recipe), item.stage
        manifest = Manifest(
            stage.name, stage.revision, item.key, config, item.input_keys, item.source_digests, {}, {}, {}, 0.0
        )
        publish(folder, item.folder, manifest)
    assert all(item.fresh for item in plan(run, stages_of(recipe)))
    return recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    root = tmp_path_factory.mktemp("whole")
    return fresh_run(root, load_recipe(embedded_recipe())), root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """Without a head, and with an SLM that is rounded."""
    root, recipe = tmp_path_factory.mktemp("alone"), load_recipe(embedded_recipe())
    recipe = changed(changed(recipe, "models.head", None), "slm.weights", SlmWeights(bits=8))
    return fresh_run(root, recipe), root


def other_value(recipe: Recipe, path: str, value: Any, scratch: Path) -> Any:
    """Another value of a field: of a checkpoint or data file a copy with other bytes."""
    if path in COPIES:
        folder = shutil.copytree(checkpoint_folder(getattr(recipe.models, COPIES[path])), scratch / "copy")
        (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
        return str(folder)
    if path.startswith("data."):
        copy = scratch / "copy.jsonl"
        copy.write_bytes(run_of(recipe, scratch).source(path.removeprefix("data."), value).read_bytes() + b"\n")
        return str(copy)
    return another(path, value)


def expected(path: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    known = [name for name in table if path == name or path.startswith(f"{name}.")]
    assert known, f"{path} is a new field: say in STALE what it changes"
    return table[max(known, key=len)]


def test_one_changed_field_makes_stale_what_reads_it(whole: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, root = whole
    seen, met = 0, set()
    for path, value in fields(recipe):
        scratch = tmp_path / path
        scratch.mkdir()
        other = changed(recipe, path, other_value(recipe, path, value, scratch))
        stale = [item for item in plan(run_of(other, root), STAGES) if not item.fresh]
        assert tuple(item.stage.name for item in stale) == expected(path, STALE), path
        if stale:
            words = {"target": "not built yet"} | {name: f"checkpoint {name[:-6]} changed" for name in COPIES}
            words |= {f"data.{name}": "data file " for name in ("calibration", "validation", "conversations")}
            assert stale[0].reason.startswith(words.get(path, path)), stale[0].reason
            assert all(item.reason for item in stale)
        met |= {name for name in STALE if path == name or path.startswith(f"{name}.")}
        seen += 1
    assert seen > 90 and met == set(STALE), set(STALE) - met


def test_a_recipe_without_a_head_reads_fewer_fields(alone: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, root = alone
    table = {name: tuple(stage for stage in stages if "head" not in stage) for name, stages in STALE.items()}
    for path, value in fields(recipe):
        if path == "models.head" or path.startswith(("data.", "models.")):
            continue
        other = changed(recipe, path, another(path, value))
        stale = [item.stage.name for item in plan(run_of(other, root), stages_of(other)) if not item.fresh]
        narrower = any(path == name or path.startswith(f"{name}.") for name in TEXT_STALE)
        assert tuple(stale) == expected(path, TEXT_STALE if narrower else table), path


def test_several_changes_are_listed_up_to_a_few(whole: tuple[Recipe, Path]) -> None:
    recipe, root = whole
    other = recipe
    for path, value in (("slm.rows", 16), ("slm.ring", 64), ("calibration.slm_margin", 1.5), ("head.window", 64)):
        other = changed(other, path, value)
    reasons = {item.stage.name: item.reason for item in plan(run_of(other, root), STAGES)}
    assert reasons["convert-slm"] == "slm.rows 32 -> 16, slm.ring 128 -> 64, calibration.slm_margin 1.2 -> 1.5"
    assert reasons["convert-head"] == "head.window 128 -> 64, input qat-head is rebuilt"
    assert reasons["compile"] == "input convert-head is rebuilt, input convert-slm is rebuilt"
    more = changed(other, "slm.wide_kv", ("v.*",))
    words = {item.stage.name: item.reason for item in plan(run_of(more, root), STAGES)}["convert-slm"]
    assert words.endswith(", and 1 more")
    new = changed(recipe, "qat.overrides", {"lm_head": 8})
    assert plan(run_of(new, root), STAGES)[1].reason == "qat.overrides.lm_head not set -> 8"


# ---- which graphs are compiled: toy graphs that follow the fields that the real ones follow, a compiler that copies


def toy_seed(*facts: Any) -> int:
    return int(content_digest([msgspec.to_builtins(fact) for fact in facts])[:6], 16)


def made(inputs: Mapping[str, Path]) -> list[str]:
    """The bytes of what earlier stages made."""
    return [
        (path / "made.txt").read_text() for path in inputs.values() if path.is_dir() and (path / "made.txt").exists()
    ]


def build_text(config: msgspec.Struct, inputs: Mapping[str, Path], out_dir: Path, progress: Any) -> dict[str, Any]:
    (out_dir / "made.txt").write_text(str(toy_seed(config, made(inputs))))
    return {}


def build_head(config: Any, inputs: Mapping[str, Path], out_dir: Path, progress: Any) -> dict[str, Any]:
    graph = best_of_mlp(toy_seed(config, made(inputs)))
    write_json(out_dir / "head.json", head_spec(save(graph, out_dir, "head")))
    write_samples(out_dir / "head_samples.safetensors", {"head": feeds(1, 0)})
    return {}


def build_slm(config: Any, inputs: Mapping[str, Path], out_dir: Path, progress: Any) -> dict[str, Any]:
    """Evidence changes no graph, and the rows of prefill none of the tree's."""
    common = msgspec.structs.replace(config.graph, evidence_passes=0, prefill_rows=1)
    tree, prefill = (
        toy_seed(common, config.calibration, made(inputs), extra) for extra in (0, config.graph.prefill_rows)
    )
    graphs = [
        save(two_layer_mlp(seed=seed), out_dir, name) for name, seed in (("slm_tree", tree), ("slm_prefill", prefill))
    ]
    write_json(out_dir / "slm.json", slm_spec(*graphs))
    (out_dir / "slm_weights.safetensors").write_text(str(tree))
    samples = {"slm_tree": feeds(1, 1), "slm_prefill": feeds(1, 2)}
    write_samples(out_dir / "slm_samples.safetensors", samples)
    return {}


BUILDS = {"convert-head": build_head, "convert-slm": build_slm}


def toy_stages() -> list[Stage]:
    return [
        replace(stage, check=no_check)
        if stage.name == "compile"
        else replace(stage, build=BUILDS.get(stage.name, build_text), check=no_check, shared=False)
        for stage in STAGES
    ]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that the compiler is asked for."""
    asked: list[str] = []

    def compile_context(model: Path, out_dir: Path, name: str, *_: object) -> CompiledContext:
        asked.append(name)
        pair = out_dir / f"{name}_ctx.onnx", out_dir / f"{name}_ctx_qnn.bin"
        for path in pair:
            path.write_bytes(model.read_bytes())
        spec = GraphSpec(name, (), ())
        info = ContextInfo(6, "build", 81, 87, None, (GraphInfo(spec, 0, 8, 3),))
        return CompiledContext(*pair, spec, info, 1.0, 1.0, 1, 1, 0)

    monkeypatch.setattr("hyco_export.stages.compile.compile_context", compile_context)
    for name in ("check_all", "prepare_data"):
        monkeypatch.setattr(f"hyco_export.stages.checks.{name}", lambda *_: None)
    return asked


GRAPHS = {  # changed field -> graphs that are compiled
    "qat.learning_rate": ("head",),
    "head.runner_up_steps": ("head",),
    "calibration.activation_percentile": ("head",),
    "slm.outlier_columns": ("slm_tree", "slm_prefill"),
    "calibration.slm_margin": ("slm_tree", "slm_prefill"),
    "slm.prefill_rows": ("slm_prefill",),
    "slm.evidence_passes": (),
    "keepset.size": ("head", "slm_tree", "slm_prefill"),
    "capture.max_new_tokens": ("head", "slm_tree", "slm_prefill"),
    "compile.max_outside_share": (),
    "target": ("head", "slm_tree", "slm_prefill"),
    "validation.epsilon": (),
}


def test_one_changed_field_compiles_the_graphs_that_it_changes(compiled: list[str], tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(load_recipe(embedded_recipe()), compile=CompileGates(emulated_feeds=0))
    build_all(run_of(recipe, tmp_path), toy_stages(), Silent())
    assert compiled == ["head", "slm_tree", "slm_prefill"]
    for path, graphs in GRAPHS.items():
        shutil.copytree(tmp_path / "run", tmp_path / path / "run")
        value = dict(fields(recipe))[path]
        run = run_of(changed(recipe, path, another(path, value)), tmp_path / path)
        compiled.clear()
        build_all(run, toy_stages(), Silent())
        assert tuple(compiled) == graphs, path
        manifest = read_manifest(run.folder(STAGES[-1]))
        told = {name: metrics["binary"] for name, metrics in manifest.metrics["graphs"].items()}
        if path != "validation.epsilon":  # nothing was built
            assert {name for name, how in told.items() if how == "compiled"} == set(graphs), path
            assert set(told.values()) <= {"compiled", "taken over"}


def test_a_damaged_binary_is_not_taken_over(compiled: list[str], tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(load_recipe(embedded_recipe()), compile=CompileGates(emulated_feeds=0))
    run, stages = run_of(recipe, tmp_path), toy_stages()
    build_all(run, stages, Silent())
    folder = run.folder(STAGES[-1])
    (folder / "slm_tree_ctx_qnn.bin").write_bytes(b"damaged")
    compiled.clear()
    build_all(run, stages, Silent())
    assert compiled == ["slm_tree"]
    assert read_manifest(folder).metrics["graphs"]["head"]["binary"] == "taken over"


def test_another_revision_or_another_compiler_takes_nothing_over(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = msgspec.structs.replace(load_recipe(embedded_recipe()), compile=CompileGates(emulated_feeds=0))
    run, stages = run_of(recipe, tmp_path), toy_stages()
    build_all(run, stages, Silent())
    newer = [*stages[:-1], replace(stages[-1], revision=stages[-1].revision + 1)]
    compiled.clear()
    build_all(run, newer, Silent())
    assert compiled == ["head", "slm_tree", "slm_prefill"]
    monkeypatch.setattr("hyco_export.stages.parts.earlier_graphs.library_versions", lambda names: {"onnxruntime": "9"})
    (run.folder(STAGES[-1]) / "parity.json").write_text("damaged")
    compiled.clear()
    build_all(run, newer, Silent())
    assert compiled == ["head", "slm_tree", "slm_prefill"]


def test_rebuild_compiles_all_that_was_built_with_other_libraries(compiled: list[str], tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(load_recipe(embedded_recipe()), compile=CompileGates(emulated_feeds=0))
    run, stages = run_of(recipe, tmp_path), toy_stages()
    build_all(run, stages, Silent())
    path = run.folder(STAGES[-1]) / "manifest.json"
    content = msgspec.json.decode(path.read_bytes())
    assert set(content["versions"]) <= set(STAGES[-1].libraries)
    content["versions"]["onnx"] = "0.1"
    path.write_bytes(msgspec.json.encode(content))
    compiled.clear()
    build_all(run, stages, Silent())
    assert compiled == [] and plan(run, stages)[-1].remark.startswith("built with onnx 0.1, now ")
    build_all(run, stages, Silent(), rebuild=True)
    assert compiled == ["head", "slm_tree", "slm_prefill"] and not plan(run, stages, rebuild=True)[-1].reason


def test_targets_have_folders_of_their_own() -> None:
    assert VALUES["target"] in TARGETS
