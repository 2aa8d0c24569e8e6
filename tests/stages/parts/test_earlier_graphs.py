"""What of an earlier compilation is taken over: what it was made from decides, and each file's sha256."""

import os
from pathlib import Path
from typing import Any

import onnx
import pytest

from hyco_export.core.artifact import COMPILE, Manifest, file_digest, publish
from hyco_export.core.files import write_json
from hyco_export.core.targets import TARGETS
from hyco_export.graph.parity import ParityReport
from hyco_export.graph.qnn_process import ContextInfo, TwoBit
from hyco_export.stages.parts.earlier_graphs import EarlierGraphs, compared_by, made_from
from tests.support.qdq_builder import two_layer_mlp

TARGET = TARGETS["sm8850"]
PAIR = ("head_ctx.onnx", "head_ctx_*.bin")
INFO = ContextInfo(6, "build", 81, 87, None, ())


def graph(folder: Path, name: str = "head", seed: int = 1, apart: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    path = two_layer_mlp(seed=seed).save(folder / f"{name}.onnx")
    if apart:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.data", size_threshold=64)
    return path


def test_a_binary_depends_on_graph_name_weights_target_and_2_bit_weights(tmp_path: Path) -> None:
    def key(model: Path, target: str = "sm8850", two_bit: TwoBit | None = None) -> str:
        return made_from(model, TARGETS[target], two_bit, file_digest)

    one = key(graph(tmp_path / "a"))
    assert one == key(graph(tmp_path / "elsewhere"))
    others = [
        key(graph(tmp_path / "b", name="slm_tree")),
        key(graph(tmp_path / "c", seed=2)),
        key(graph(tmp_path / "a"), target="sm8750"),
        key(graph(tmp_path / "a"), two_bit=TwoBit("/cache/0123/lib.so", ("up",))),
        key(graph(tmp_path / "a"), two_bit=TwoBit("/cache/4567/lib.so", ("up",))),
        key(graph(tmp_path / "a"), two_bit=TwoBit("/cache/0123/lib.so", ("down",))),
    ]
    assert len({one, *others}) == 7
    apart = graph(tmp_path / "d", apart=True)
    before = key(apart)
    weights = bytearray((tmp_path / "d" / "weights.data").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "d" / "weights.data").write_bytes(weights)
    assert key(apart) != before


def test_a_comparison_depends_on_the_binary_its_feeds_and_its_limits(tmp_path: Path) -> None:
    feeds = tmp_path / "feeds"
    feeds.write_text("1")
    found = [compared_by(made, [feeds], limits, file_digest) for made, limits in (("a", 1), ("b", 1), ("a", 2))]
    feeds.write_text("2")
    assert len({*found, compared_by("a", [feeds], 1, file_digest)}) == 4


def artifact(tmp_path: Path) -> Path:
    build = tmp_path / "build"
    build.mkdir()
    (build / "head_ctx.onnx").write_text("context")
    (build / "head_ctx_qnn.bin").write_text("binary")
    write_json(build / "contexts.json", {"head": INFO})
    write_json(build / "parity.json", {"head": ParityReport("head", 1, ())})
    metrics: dict[str, Any] = {"graphs": {"head": {"binary_mb": 1.0, "made_from": "key", "compared_by": "other key"}}}
    publish(build, tmp_path / "compile", Manifest(COMPILE, 1, "k", {}, {}, {}, {}, metrics, {}, 0.0))
    return tmp_path / "compile"


def test_what_was_made_from_the_same_is_linked(tmp_path: Path) -> None:
    folder, out = artifact(tmp_path), tmp_path / "out"
    out.mkdir()
    earlier = EarlierGraphs(folder)
    assert earlier.metrics("head", "key") and earlier.metrics("head", "another") is None
    assert earlier.metrics("slm_tree", "key") is None and earlier.shared_metrics("key") is None
    assert earlier.info("head") == INFO and earlier.info("slm_tree") is None
    report = earlier.report("head", "other key")
    assert report is not None and report.runs == 1 and earlier.report("head", "key") is None
    assert earlier.take(PAIR, out)
    assert sorted(path.name for path in out.iterdir()) == ["head_ctx.onnx", "head_ctx_qnn.bin"]
    assert all(path.samefile(folder / path.name) for path in out.iterdir())
    assert not earlier.take(("slm_tree_ctx*",), out)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_damaged_file_takes_nothing_over(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = artifact(tmp_path), tmp_path / "out"
    out.mkdir()
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
        assert EarlierGraphs(folder).take(PAIR, out)
        assert not any(path.samefile(folder / path.name) for path in out.iterdir())
        for path in out.iterdir():
            path.unlink()
    (folder / "head_ctx_qnn.bin").write_text("bjnary")
    (folder / "contexts.json").write_text("{}")
    assert not EarlierGraphs(folder).take(PAIR, out)
    assert list(out.iterdir()) == [] and EarlierGraphs(folder).info("head") is None


def test_without_an_artifact_nothing_is_taken_over(tmp_path: Path) -> None:
    none = EarlierGraphs(None)
    assert (none.metrics("head", ""), none.info("head"), none.report("head", "")) == (None, None, None)
    assert not none.take(["*"], tmp_path)
