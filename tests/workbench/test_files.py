"""Every kind of file is told from its bytes; hostile ones get a typed refusal, quickly and in bounded memory."""

import io
import json
import os
import resource
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from hyco_export.errors import FormatError, HycoError
from hyco_export.workbench.facts import chunks
from hyco_export.workbench.files import read_file
from tests.endurance.fuzz_files import compiled, right_files
from tests.support.qdq_builder import two_layer_mlp

KINDS = {
    ".onnx": "ONNX graph",
    ".safetensors": "safetensors",
    ".gguf": "GGUF",
    ".npz": "npz",
    ".pyz": "pyz",
    ".json": "JSON",
}
LIMIT_S = 1.0  # of CPU time
MEMORY_BYTES = 1_500_000_000  # of address space for a hostile file, Python and its libraries included
READ = """
import sys, time
from pathlib import Path
from hyco_export.errors import FormatError
from hyco_export.workbench.files import read_file
begun = time.process_time()
try:
    read_file(Path(sys.argv[1]))
except FormatError as error:
    print(error.message)
else:
    print("read")
print(time.process_time() - begun)
"""


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refused_in_bounds(path: Path) -> str:
    """The refusal, in a process whose memory is bounded and whose time is counted."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=bound, check=True)
    message, took = done.stdout.rsplit("\n", 2)[:2]
    assert float(took) < LIMIT_S
    return message


@pytest.mark.parametrize("suffix", KINDS)
def test_each_kind_is_known_by_its_bytes(tmp_path: Path, suffix: str) -> None:
    facts = read_file(written(tmp_path, f"file{suffix}", right_files(tmp_path)[suffix]))
    assert facts.kind == KINDS[suffix]
    assert facts.facts or facts.tensors


def test_a_graph_shows_what_its_inputs_mean_and_where_its_weights_lie(tmp_path: Path) -> None:
    path = two_layer_mlp().save(tmp_path / "mlp.onnx")
    facts, model = read_file(path), onnx.load(path)
    tensors = {(tensor.role, tensor.name): tensor for tensor in facts.tensors}
    assert tensors["input", "x"].shape == (4, 32) and "scale" in tensors["input", "x"].encoding
    assert "zero point" in tensors["output", "y"].encoding
    compared = 0
    for tensor in model.graph.initializer:
        if tensor.name in facts.stored:
            values = np.concatenate(list(chunks(facts.stored[tensor.name], tensors["weight", tensor.name].dtype)))
            wanted = onnx.numpy_helper.to_array(tensor).astype(np.float64).ravel()
            np.testing.assert_array_equal(values[: wanted.size], wanted)
            compared += 1
    assert compared > 5 and any(tensor.dtype == "int4" for tensor in facts.tensors)


def test_a_context_binary_and_what_only_looks_like_one(tmp_path: Path) -> None:
    binary = compiled(tmp_path)
    facts = read_file(binary)
    assert facts.kind == "context binary" and facts.facts["target"].startswith("v81, SoC model 87")
    assert {tensor.role for tensor in facts.tensors} == {"input", "output"}
    with pytest.raises(FormatError, match="begins with"):
        read_file(written(tmp_path, "no.bin", b"\x7fELF" + bytes(60)))
    with pytest.raises(HycoError, match=r"cut.bin"):
        read_file(written(tmp_path, "cut.bin", binary.read_bytes()[:5000]))


def test_values_of_every_stored_type_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {str(dtype): torch.tensor([1, 2, 3]).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.float16)}
    save_torch(tensors, tmp_path / "t.safetensors")
    facts = read_file(tmp_path / "t.safetensors")
    assert len(facts.stored) == 3
    for tensor in facts.tensors:
        np.testing.assert_array_equal(np.concatenate(list(chunks(facts.stored[tensor.name], tensor.dtype))), [1, 2, 3])


def test_unknown_empty_and_special_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HycoError, match="no kind that is known"):
        read_file(written(tmp_path, "x.txt", b"hello"))
    with pytest.raises(FormatError, match="empty"):
        read_file(written(tmp_path, "x.onnx", b""))
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(HycoError, match="is no file"):
        read_file(tmp_path / "pipe.onnx")
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    with pytest.raises(HycoError, match="is no file"):
        read_file(tmp_path / "loop.onnx")


# ---- hostile files


def bomb(members: int = 1, size: int = 300_000_000) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(members):
            with archive.open(f"m{number}.py", "w") as member:
                for _ in range(size // 10_000_000):
                    member.write(bytes(10_000_000))
        archive.writestr("__main__.py", "")
    return file.getvalue()


def stored_zip(names: list[str], content: bytes = b"x") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def overlapping() -> bytes:
    """Two members over the same bytes."""
    content = bytearray(stored_zip(["a.py", "b.py"], b"x" * 100))
    second = content.rfind(b"PK\x01\x02")
    content[second + 42 : second + 46] = (0).to_bytes(4, "little")
    return bytes(content)


def safetensors_header(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def gguf(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def object_array() -> bytes:
    file, member = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array(member, np.array([object], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", member.getvalue())
    return file.getvalue()


ONE_ENTRY = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
HOSTILE = {
    "bomb.pyz": (bomb, "a zip bomb"),
    "leaves.pyz": (lambda: stored_zip(["../../etc/x", "__main__.py"]), "leaves the folder"),
    "shared.zip": (overlapping, "shares bytes with another"),
    "many.zip": (lambda: stored_zip([f"m{number}" for number in range(20_001)]), "20,001 members"),
    "pickle.npz": (object_array, "holds Python objects"),
    "long.safetensors": (lambda: safetensors_header(b"{}", 2**62), "a header of"),
    "short.safetensors": (lambda: safetensors_header(json.dumps(ONE_ENTRY).encode()), "lies at bytes"),
    "deep.safetensors": (lambda: safetensors_header(b'{"a":' + b"[" * 500_000), "its header is not"),
    "huge.safetensors": (
        lambda: safetensors_header(
            json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}).encode()
        ),
        "for float32",
    ),
    "counts.gguf": (lambda: gguf(2**60, 1), "tensors, at most"),
    "texts.gguf": (
        lambda: gguf(0, 1, gguf_text(b"k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(1000)),
        "brings its texts to",
    ),
    "array.gguf": (lambda: gguf(0, 1, gguf_text(b"k") + struct.pack("<IIQ", 9, 6, 2**62)), "array"),
    "rank.gguf": (lambda: gguf(1, 0, gguf_text(b"t") + struct.pack("<I", 2**32 - 1)), "shape"),
    "text.gguf": (lambda: gguf(0, 1, struct.pack("<Q", 2**63)), "would end at byte"),
    "deep.json": (lambda: b"[" * 3_000_000, "not JSON"),
    "parts.onnx": (lambda: b"\x3a\x80\x80\x80\x08" + b"\x0a\x00" * 8_388_608, "no graph has so many"),
    "nested.onnx": (lambda: b"\x3a\x80\x80\x40" + b"\x0a\xfc\xff\x3f" + b"\x2a\x00" * 524_286, "ONNX|parts"),
    "length.onnx": (lambda: b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "beyond"),
    "number.onnx": (lambda: b"\x08" + b"\xff" * 30, "no number"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_quickly_in_bounded_memory(tmp_path: Path, name: str) -> None:
    make, message = HOSTILE[name]
    said = refused_in_bounds(written(tmp_path, name, make()))
    if name != "nested.onnx":  # an honest graph of half a million empty attributes: it is read, in bounds
        assert message in said


def circular_graph(weights_in: str = "") -> onnx.ModelProto:
    """Reshapes in a circle, and concatenations that double their paths at every step."""
    nodes = [helper.make_node("Reshape", ["x", "s"], ["a0"]), helper.make_node("Reshape", ["b", "s"], ["c"])]
    nodes += [helper.make_node("Reshape", ["c", "s"], ["b"])]
    nodes += [helper.make_node("Concat", [f"a{n}", f"a{n}"], [f"a{n + 1}"], axis=0) for n in range(200)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "b", "a200")]
    graph = helper.make_graph(nodes, "circle", values[:1], values[1:])
    if weights_in:
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=weights_in)
        graph.initializer.append(tensor)
    return helper.make_model(graph)


def test_graphs_that_run_in_circles_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "circle.onnx", circular_graph().SerializeToString())
    begun = time.process_time()
    facts = read_file(path)
    assert time.process_time() - begun < LIMIT_S
    assert [tensor.encoding for tensor in facts.tensors] == ["", "", ""]


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "model").mkdir()
    for place in ("../secret", "/etc/passwd"):
        path = written(tmp_path / "model", "m.onnx", circular_graph(place).SerializeToString())
        with pytest.raises(FormatError, match="points out of the folder"):
            read_file(path)
    save_file({"a": np.zeros(3)}, tmp_path / "model" / "beside")
    path = written(tmp_path / "model", "m.onnx", circular_graph("beside").SerializeToString())
    assert read_file(path).stored["w"].path.name == "beside"
