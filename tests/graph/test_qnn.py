"""Compiling for a target and running in the emulator, end to end on a two-layer int4 MLP."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph.parity import ReferenceSession, compare_sessions
from hyco_export.graph.qnn import CompiledContext, compile_context, open_context
from tests.support.qdq_builder import QdqBuilder, random_linear, two_layer_mlp

SM8850 = TARGETS["sm8850"]


def digests(folder: Path) -> dict[str, str]:
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.suffix != ".log"}
    assert len(found) == 2, found
    return found


def test_compiles_into_one_pair_with_the_target_asked_for(compiled_mlp: CompiledContext) -> None:
    assert compiled_mlp.context_model.name == "mlp_ctx.onnx"
    assert compiled_mlp.binary.parent == compiled_mlp.context_model.parent
    assert compiled_mlp.binary_bytes == compiled_mlp.binary.stat().st_size > 1000
    assert (compiled_mlp.info.htp_arch, compiled_mlp.info.soc_model, compiled_mlp.info.soc) == (81, 87, "SM8850")
    assert 0 < compiled_mlp.wall_s < 60 and compiled_mlp.cpu_s > 0
    assert 50e6 < compiled_mlp.peak_rss_bytes < 2e9
    assert [tensor.name for tensor in compiled_mlp.spec.inputs] == ["x"]


def test_vendor_noise_lands_in_the_log(compiled_mlp: CompiledContext) -> None:
    assert "onnxruntime" in (compiled_mlp.context_model.parent / "compile.log").read_text()


def test_same_graph_gives_same_bytes_in_any_folder(
    compiled_mlp: CompiledContext, mlp_model: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "another" / mlp_model.name
    elsewhere.parent.mkdir()
    shutil.copy(mlp_model, elsewhere)
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    compile_context(elsewhere, out_dir, "mlp", SM8850, tmp_path / "compile.log")
    assert digests(out_dir) == digests(compiled_mlp.context_model.parent)


def test_weights_in_another_file_give_the_same_bytes(
    compiled_mlp: CompiledContext, mlp_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "in" / mlp_model.name
    path.parent.mkdir()
    model = onnx.load(mlp_model)
    for constant in model.graph.initializer:
        constant.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(constant), constant.name))
    onnx.save(model, path, save_as_external_data=True, location="weights.data", size_threshold=256)
    assert (path.parent / "weights.data").stat().st_size > 1000
    compiled = compile_context(path, tmp_path, "mlp", SM8850, tmp_path / "compile.log")
    assert compiled.binary.read_bytes() == compiled_mlp.binary.read_bytes()


def test_emulator_agrees_with_the_cpu_reference(
    compiled_mlp: CompiledContext, mlp_model: Path, mlp_feed: dict[str, np.ndarray]
) -> None:
    with open_context(compiled_mlp.context_model, SM8850) as candidate:
        report = compare_sessions(ReferenceSession(mlp_model), candidate, compiled_mlp.spec, [mlp_feed])
    assert report.passed
    assert min(output.sqnr_db for output in report.outputs) > 60  # 67 dB seen; a wrong weight or grid gives below 20


def test_session_knows_its_inputs_and_outputs(compiled_mlp: CompiledContext) -> None:
    with open_context(compiled_mlp.context_model, SM8850) as session:
        assert [(t.name, t.shape, t.dtype) for t in session.inputs] == [("x", (4, 32), "uint16")]
        assert [(t.name, t.shape, t.dtype) for t in session.outputs] == [("y", (4, 32), "uint16")]


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "mlp_ctx.onnx needs input x"),
        ({"x": np.zeros((4, 31), np.uint16)}, r"takes x as uint16 \[4, 32\], got uint16 \[4, 31\]"),
        ({"x": np.zeros((4, 32), np.float32)}, r"takes x as uint16 \[4, 32\], got float32 \[4, 32\]"),
        ({"x": np.zeros((4, 32), np.uint16), "y": np.zeros(1)}, "has no input y"),
    ],
)
def test_wrong_feeds_are_refused_before_they_run(
    compiled_mlp: CompiledContext, feed: dict[str, np.ndarray], message: str
) -> None:
    with open_context(compiled_mlp.context_model, SM8850) as session, pytest.raises(CompileError, match=message):
        session.run(feed)


def test_session_costs_milliseconds_per_call(compiled_mlp: CompiledContext, mlp_feed: dict[str, np.ndarray]) -> None:
    with open_context(compiled_mlp.context_model, SM8850) as session:
        session.run(mlp_feed)
        start_s = time.perf_counter()
        for _ in range(20):
            session.run(mlp_feed)
        per_call_s = (time.perf_counter() - start_s) / 20
    assert per_call_s < 0.2  # 1-4 ms seen on an idle core, emulation included


@pytest.mark.parametrize("name", ["sm8845", "sm8750", "sm8650", "sm8550", "x-elite", "x2-elite"])
def test_every_other_target_compiles_and_reads_back(name: str, mlp_model: Path, tmp_path: Path) -> None:
    target = TARGETS[name]
    compiled = compile_context(mlp_model, tmp_path, "mlp", target, tmp_path / "compile.log")
    assert (compiled.info.htp_arch, compiled.info.soc_model, compiled.info.soc) == (
        target.htp_arch,
        target.soc_model,
        target.soc,
    )


@pytest.mark.parametrize(
    ("made_for", "opened_for"),
    [
        ("sm8850", "sm8750"),
        ("sm8850", "sm8845"),
        ("sm8750", "sm8850"),  # the libraries would open it
        ("sm8550", "sm8850"),
        ("x-elite", "sm8550"),  # of one architecture
    ],
)
def test_binary_for_another_target_is_refused(made_for: str, opened_for: str, mlp_model: Path, tmp_path: Path) -> None:
    made, asked = TARGETS[made_for], TARGETS[opened_for]
    compiled = compile_context(mlp_model, tmp_path, "mlp", made, tmp_path / "compile.log")
    with pytest.raises(CompileError) as caught:
        open_context(compiled.context_model, asked)
    assert caught.value.message == (
        f"mlp_ctx.onnx: compiled for v{made.htp_arch}/SoC {made.soc_model}, "
        f"asked for v{asked.htp_arch}/SoC {asked.soc_model}"
    )
    assert caught.value.hint.endswith(f"compile --target {opened_for}")


def copy_pair(compiled: CompiledContext, folder: Path) -> tuple[Path, Path]:
    return (
        Path(shutil.copy(compiled.context_model, folder)),
        Path(shutil.copy(compiled.binary, folder)),
    )


def test_missing_binary_is_named(compiled_mlp: CompiledContext, tmp_path: Path) -> None:
    context_model, binary = copy_pair(compiled_mlp, tmp_path)
    binary.unlink()
    with pytest.raises(CompileError, match=r"the binary that mlp_ctx.onnx names is missing \(keep the .bin beside"):
        open_context(context_model, SM8850)


@pytest.mark.parametrize("kept_share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_binary_is_named(kept_share: float, compiled_mlp: CompiledContext, tmp_path: Path) -> None:
    context_model, binary = copy_pair(compiled_mlp, tmp_path)
    os.truncate(binary, int(binary.stat().st_size * kept_share))
    with pytest.raises(CompileError, match=r"the binary of mlp_ctx.onnx is (empty|truncated or damaged) \(copy it"):
        open_context(context_model, SM8850)


def test_missing_model_and_context_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nothing.onnx does not exist"):
        compile_context(tmp_path / "nothing.onnx", tmp_path, "x", SM8850, tmp_path / "log")
    with pytest.raises(CompileError, match=r"nothing_ctx.onnx does not exist"):
        open_context(tmp_path / "nothing_ctx.onnx", SM8850)


def test_nodes_that_would_fall_back_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    build = two_layer_mlp()
    table = build.weight("table", *random_linear(rng, 64, 32), axis=0, dtype=TensorProto.INT8)
    looked_up = build.node("Gather", [table, build.plain_input("ids", (4,))], ["row_real"], axis=0)
    build.output(build.quantize(looked_up, "row", (4, 32), -2, 2))
    model = build.save(tmp_path / "split.onnx")
    with pytest.raises(CompileError) as caught:
        compile_context(model, tmp_path, "split", SM8850, tmp_path / "compile.log")
    assert caught.value.message == (
        "the NPU cannot run all of split: 1 operator(s) would fall back to the CPU: DequantizeLinear "
        "DequantizeLinear_table_real (QNN EP does not support a standalone DQ op with per-channel quantization)"
    )
    assert str(tmp_path / "compile.fallback.log") in caught.value.hint
    assert not list(tmp_path.glob("split_ctx*"))


def test_integer_passes_survive_the_compiler(tmp_path: Path) -> None:
    # ids in, table rows out: bit for bit, no grid involved
    rng = np.random.default_rng(2)
    build = QdqBuilder()
    ids = build.plain_input("ids", (6,))
    grid = build.grid("table", build.input("spare", (1, 16), -1, 1, "uint8").encoding)
    build.constant("table", rng.integers(0, 256, (97, 16)).astype(np.uint8))
    build.inputs.pop()
    real = build.node("DequantizeLinear", ["table", *grid], ["table_real"])
    rows = build.node("Gather", [real, ids], ["rows_real"], axis=0)
    build.output(build.quantize(rows, "rows", (6, 16), -1, 1, "uint8"))
    model = build.save(tmp_path / "lookup.onnx")
    compiled = compile_context(model, tmp_path, "lookup", SM8850, tmp_path / "compile.log")
    feed = {"ids": np.array([0, 96, 5, 5, 41, 1], np.int32)}
    with open_context(compiled.context_model, SM8850) as session:
        found = session.run(feed)["rows"]
    assert np.array_equal(found, ReferenceSession(model).run(feed)["rows"])


BUSY_COMPILE = """
import sys
from pathlib import Path
from hyco_export.core.targets import TARGETS
from hyco_export.graph.qnn import compile_context
print("go", flush=True)
model, out = Path(sys.argv[1]), Path(sys.argv[2])
compile_context(model, out, "big", TARGETS["sm8850"], out / "log")
"""


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def wait_for(condition, seconds: float = 20.0) -> bool:
    """Poll with a pause: there is no event to wait on for another process's child."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_a_killed_parent_leaves_no_compiler_behind(tmp_path: Path) -> None:
    model = two_layer_mlp(rows=32, width=1024, hidden=4096).save(tmp_path / "big.onnx")
    parent = subprocess.Popen(
        [sys.executable, "-c", BUSY_COMPILE, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdout.readline() == "go\n"
    assert wait_for(lambda: children(parent.pid))
    worker = children(parent.pid)[0]
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_checker_accepts_the_test_graph(mlp_model: Path) -> None:
    onnx.checker.check_model(onnx.load(mlp_model), full_check=True)
