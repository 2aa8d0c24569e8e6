"""Reading back what a context binary and its EPContext model say, and refusing what differs from the request."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import onnx
import pytest

from hyco_export.core.encodings import Encoding
from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph import context_binary, context_check
from hyco_export.graph.context_binary import read_context
from hyco_export.graph.context_check import COMPATIBILITY_KEY, check_context, read_context_model
from hyco_export.graph.qnn import CompiledContext
from hyco_export.graph.qnn_process import ContextInfo

SM8850 = TARGETS["sm8850"]


def test_binary_says_target_build_and_graph(compiled_mlp: CompiledContext) -> None:
    info = read_context(compiled_mlp.binary)
    assert (info.backend_id, info.htp_arch, info.soc_model, info.soc) == (6, 81, 87, "SM8850")
    assert info.build_id.startswith("v2.")
    (graph,) = info.graphs
    assert graph.vtcm_bytes == SM8850.vtcm_bytes
    assert graph.optimisation_level == 3
    assert graph.spill_fill_bytes >= 0


def test_binary_has_the_graphs_interface_with_encodings(compiled_mlp: CompiledContext) -> None:
    (graph,) = read_context(compiled_mlp.binary).graphs
    assert [t.name for t in graph.spec.inputs] == ["x"]
    assert graph.spec.inputs == compiled_mlp.spec.inputs
    assert graph.spec.outputs == compiled_mlp.spec.outputs
    assert graph.spec.outputs[0].encoding is not None


def test_info_survives_json(compiled_mlp: CompiledContext) -> None:
    info = compiled_mlp.info
    assert msgspec.json.decode(msgspec.json.encode(info), type=ContextInfo) == info


def test_layout_has_the_sizes_that_were_measured() -> None:
    import ctypes

    assert ctypes.sizeof(context_binary.Tensor) == 144
    assert ctypes.sizeof(context_binary.Graph) == 88  # seen between the graphs of a weight-shared binary
    assert context_binary.Provider.functions.offset == 32


def test_missing_empty_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"x.bin does not exist"):
        read_context(tmp_path / "x.bin")
    foreign = tmp_path / "foreign.bin"
    foreign.write_bytes(b"")
    with pytest.raises(CompileError) as empty:
        read_context(foreign)
    assert empty.value.message == "context binary foreign.bin is empty"
    assert empty.value.hint == "compile it again: hyco-export compile"
    foreign.write_bytes(os.urandom(4096))
    with pytest.raises(CompileError, match=r"could not read the file as a context binary \(code 0x753a\)") as damaged:
        read_context(foreign)
    assert damaged.value.message.startswith("foreign.bin: the vendor's system library")
    assert "compile it again" in damaged.value.hint


def test_another_layout_version_is_refused_not_guessed(compiled_mlp: CompiledContext) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from hyco_export.graph import context_binary\n"
        "context_binary.BINARY_INFO_VERSION = 4\n"
        "from hyco_export.graph.qnn import system_library\n"
        "context_binary.parse_context(Path(sys.argv[1]), system_library())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(compiled_mlp.binary)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "describes binaries in layout 3, this version reads 4" in done.stderr


def test_context_model_says_target_and_binary(compiled_mlp: CompiledContext) -> None:
    said = read_context_model(compiled_mlp.context_model)
    assert (said.htp_arch, said.soc_model, said.vtcm_mb) == (81, 87, 8)
    assert said.binary == compiled_mlp.binary.name
    assert said.sdk_version == compiled_mlp.info.build_id
    assert [t.shape for t in said.inputs] == [(4, 32)]


def edited(compiled: CompiledContext, folder: Path, edit) -> Path:
    """A copy of the pair whose EPContext model was changed by `edit`."""
    shutil.copy(compiled.binary, folder)
    model = onnx.load(compiled.context_model, load_external_data=False)
    edit(model)
    path = folder / compiled.context_model.name
    onnx.save(model, path)
    return path


def test_a_second_node_is_refused_and_named(compiled_mlp: CompiledContext, tmp_path: Path) -> None:
    path = edited(
        compiled_mlp,
        tmp_path,
        lambda model: model.graph.node.append(onnx.helper.make_node("Cast", ["y"], ["z"], name="stray", to=1)),
    )
    with pytest.raises(CompileError, match=r"one EPContext node and nothing else, it holds: EPContext .*, Cast stray"):
        check_context([path], [compiled_mlp.spec], SM8850)


def test_a_model_without_target_is_refused(compiled_mlp: CompiledContext, tmp_path: Path) -> None:
    path = edited(compiled_mlp, tmp_path, lambda model: model.metadata_props.pop(0))
    properties = [p.key for p in onnx.load(path, load_external_data=False).metadata_props]
    assert COMPATIBILITY_KEY not in properties
    with pytest.raises(CompileError, match="does not say its target"):
        check_context([path], [compiled_mlp.spec], SM8850)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x_ctx.onnx"
    path.write_bytes(b"\x00not a model")
    with pytest.raises(CompileError, match="is not an ONNX model"):
        read_context_model(path)


def test_another_target_is_noticed(compiled_mlp: CompiledContext) -> None:
    with pytest.raises(CompileError, match="compiled for v81/SoC 87, asked for v79/SoC 69"):
        check_context([compiled_mlp.context_model], [compiled_mlp.spec], TARGETS["sm8750"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"soc_model": 69, "htp_arch": 79}, "the binary is for v79/SoC 69, asked for v81/SoC 87"),
        ({"soc": "SM8750"}, "the compiler's note in the binary says SM8750, asked for SM8850"),
        ({"backend_id": 5}, r"backend 5 instead of HTP \(6\)"),
        ({"graphs": ()}, "0 graphs in the binary instead of 1"),
    ],
)
def test_what_the_binary_says_is_compared(
    changes: dict, message: str, compiled_mlp: CompiledContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = msgspec.structs.replace(compiled_mlp.info, **changes)
    monkeypatch.setattr(context_check, "read_context", lambda binary: altered)
    with pytest.raises(CompileError, match=message):
        check_context([compiled_mlp.context_model], [compiled_mlp.spec], SM8850)


def test_level_1_finalisation_is_refused(compiled_mlp: CompiledContext, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = msgspec.structs.replace(compiled_mlp.info.graphs[0], optimisation_level=1)
    altered = msgspec.structs.replace(compiled_mlp.info, graphs=(graph,))
    monkeypatch.setattr(context_check, "read_context", lambda binary: altered)
    with pytest.raises(CompileError, match="optimisation level 1, which loses accuracy silently"):
        check_context([compiled_mlp.context_model], [compiled_mlp.spec], SM8850)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "w"}, r"outputs \['y'\] in the binary, \['w'\] in the graph"),
        ({"shape": (4, 33)}, "output y is .* in the binary"),
        ({"dtype": "uint8"}, "output y is .* in the binary"),
        ({"encoding": Encoding("uint16", 0.5, 32768)}, "output y is .* in the binary"),
    ],
)
def test_another_interface_is_noticed(changes: dict, message: str, compiled_mlp: CompiledContext) -> None:
    output = msgspec.structs.replace(compiled_mlp.spec.outputs[0], **changes)
    spec = msgspec.structs.replace(compiled_mlp.spec, outputs=(output,))
    with pytest.raises(CompileError, match=message):
        check_context([compiled_mlp.context_model], [spec], SM8850)


def test_a_binary_alone_is_judged_too(compiled_mlp: CompiledContext) -> None:
    context_check.require_sound(compiled_mlp.info, "mlp.bin")
    graph = msgspec.structs.replace(compiled_mlp.info.graphs[0], optimisation_level=1)
    with pytest.raises(CompileError, match=r"mlp\.bin: finalised at optimisation level 1"):
        context_check.require_sound(msgspec.structs.replace(compiled_mlp.info, graphs=(graph,)), "mlp.bin")
