"""Two graphs in one binary: weights in common are stored once, and what the binary says is checked."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph import smaller_binaries
from hyco_export.graph.context_binary import read_context
from hyco_export.graph.context_check import check_context, read_context_model, require_sound
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.smaller_binaries import SharedContext, compile_shared
from tests.support.qdq_builder import QdqBuilder, random_linear

SM8850 = TARGETS["sm8850"]
WIDTH, ROWS = 512, {"few": 4, "many": 16}


def linear(rows: int, folder: Path, name: str) -> Path:
    """The same weight whatever the number of rows, as of a tree pass and a prefill."""
    builder = QdqBuilder()
    x = builder.input("x", (rows, WIDTH), -4, 4)
    weight = builder.weight("w", *random_linear(np.random.default_rng(0), WIDTH, WIDTH), axis=0)
    out = builder.node("Gemm", [builder.real(x), weight], ["y_out"], transB=1)
    builder.output(builder.quantize(out, "y", (rows, WIDTH), -8, 8))
    return builder.save(folder / f"{name}.onnx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def shared(folder: Path) -> SharedContext:
    models = [linear(rows, folder, name) for name, rows in ROWS.items()]
    return compile_shared(models, folder, tuple(ROWS), SM8850, folder / "log")


def test_common_weights_are_stored_once(shared: SharedContext, folder: Path) -> None:
    alone = [compile_context(folder / f"{n}.onnx", folder, n, SM8850, folder / "log").binary_bytes for n in ROWS]
    weight_bytes = WIDTH * WIDTH // 2
    assert shared.binary_bytes < sum(alone) - 0.9 * weight_bytes
    assert shared.binary_bytes < min(alone) + 0.5 * weight_bytes


def test_every_graph_is_in_the_one_binary_with_its_interface(shared: SharedContext) -> None:
    said = [read_context_model(path) for path in shared.context_models]
    assert {model.binary for model in said} == {shared.binary.name}
    info = read_context(shared.binary)
    shapes = {graph.spec.name: graph.spec.inputs[0].shape for graph in info.graphs}
    assert [shapes[model.graph] for model in said] == [(4, WIDTH), (16, WIDTH)]
    assert [graph.optimisation_level for graph in info.graphs] == [3, 3]
    require_sound(info, shared.binary.name)


def test_a_shared_binary_is_not_taken_for_a_single_one(shared: SharedContext) -> None:
    spec = shared.info.graphs[0].spec
    with pytest.raises(CompileError, match="2 graphs in the binary instead of 1"):
        check_context([shared.context_models[0]], [spec], SM8850)


def test_x86_cannot_load_it(shared: SharedContext) -> None:
    # refused or a crash of the worker; when this stops, validate the shared binary instead of the separate ones
    with pytest.raises(CompileError), open_context(shared.context_models[0], SM8850) as session:
        session.run({"x": np.zeros((4, WIDTH), np.uint16)})


def test_what_is_refused_leaves_no_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise CompileError("not this one", "")

    monkeypatch.setattr(smaller_binaries, "check_context", refuse)
    models = [linear(rows, tmp_path, name) for name, rows in ROWS.items()]
    with pytest.raises(CompileError, match="not this one"):
        compile_shared(models, tmp_path, tuple(ROWS), SM8850, tmp_path / "log")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.onnx", "log", "many.onnx"]
    with pytest.raises(CompileError, match=r"none\.onnx does not exist"):
        compile_shared([tmp_path / "none.onnx"], tmp_path, ("none",), SM8850, tmp_path / "log")
