"""Every kind of file is told from its bytes; hostile ones get a typed refusal, quickly and in bounded memory."""

import io
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hyco_export.errors import FormatError, HycoError
from hyco_export.workbench.files import read_file
from tests.endurance.fuzz_files import compiled, right_files

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


def test_a_context_binary_and_what_only_looks_like_one(tmp_path: Path) -> None:
    binary = compiled(tmp_path)
    facts = read_file(binary)
    assert facts.kind == "context binary" and facts.facts["target"].startswith("v81, SoC model 87")
    assert {tensor.role for tensor in facts.tensors} == {"input", "output"}
    with pytest.raises(FormatError, match="begins with"):
        read_file(written(tmp_path, "no.bin", b"\x7fELF" + bytes(60)))
    with pytest.raises(HycoError, match=r"cut.bin"):
        read_file(written(tmp_path, "cut.bin", binary.read_bytes()[:5000]))


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
