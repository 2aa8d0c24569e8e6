"""The file fuzzer: mutated, cut and hostile files through `inspect`'s readers.

Run: `make fuzz-files` (100,000 files; 200 context binaries, each read in a process of its own). It fails on an
exception that is no refusal, a file that takes longer than a second of this process's time, and memory that grows.
"""

import argparse
import gc
import io
import json
import struct
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from gguf import GGUFWriter
from safetensors.numpy import save

from hyco_export.core.targets import TARGETS
from hyco_export.errors import FormatError, HycoError
from hyco_export.graph.qnn import compile_context
from hyco_export.workbench.files import read_file
from tests.support.qdq_builder import two_layer_mlp

LIMIT_S = 1.0  # of CPU time, for one file
MB = 1e6
WARM_UP = 0.2  # share of the files after which memory must stay
COUNTS = (0, 1, 2, 0x7F, 0xFF, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
SUFFIXES = (".onnx", ".safetensors", ".gguf", ".npz", ".pyz", ".json")


@dataclass
class Finding:
    """What a run saw."""

    files: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    growth_mb: float = 0.0
    seconds: float = 0.0


def right_files(folder: Path) -> dict[str, bytes]:
    """One right file of each kind, by suffix."""
    generator = np.random.default_rng(5)
    arrays = {f"layers.{n}.weight": generator.normal(size=(8, 4)).astype(np.float32) for n in range(3)}
    onnx_file = two_layer_mlp().save(folder / "right.onnx")
    npz, pyz, gguf = io.BytesIO(), io.BytesIO(), folder / "right.gguf"
    np.savez(npz, allow_pickle=False, **arrays)
    with zipfile.ZipFile(pyz, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "print(1)\n" * 20)
        archive.writestr("package/__init__.py", "x = 1\n" * 20)
    writer = GGUFWriter(gguf, "gemma3")
    writer.add_context_length(256)
    writer.add_token_list(["<pad>", "a", "b"])
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    document = json.dumps({"a": [1, 2, {"b": None}], "scale": 0.5, "name": "x"}).encode()
    return {
        ".onnx": onnx_file.read_bytes(),
        ".safetensors": save(arrays, {"format": "np"}),
        ".gguf": gguf.read_bytes(),
        ".npz": npz.getvalue(),
        ".pyz": b"#!/usr/bin/env python3\n" + pyz.getvalue(),
        ".json": document,
    }


class FileMutator:
    """Mutations by seed: counts and lengths made wrong, parts cut out, doubled or moved, bytes changed."""

    def __init__(self, seed: int, rights: dict[str, bytes]) -> None:
        self.dice = np.random.default_rng(seed)
        self.rights = rights

    def file(self) -> tuple[str, bytes]:
        """Suffix and bytes."""
        suffix = SUFFIXES[int(self.dice.integers(len(SUFFIXES)))]
        content = self.changed(suffix)
        if self.dice.random() < 0.03:
            suffix = SUFFIXES[int(self.dice.integers(len(SUFFIXES)))]
        return suffix, content

    def changed(self, suffix: str) -> bytes:
        """A right file of this kind with some changes."""
        content = self.rights[suffix]
        for _ in range(int(self.dice.geometric(0.5))):
            content = self._change(content)
        return content

    def _change(self, content: bytes) -> bytes:
        if not content:
            return content
        dice, changed = self.dice, bytearray(content)
        at = int(dice.integers(len(changed)))
        # headers matter most, and they are at one of the ends
        at = int(at * dice.random()) if dice.random() < 0.7 else len(changed) - 1 - int(at * dice.random())
        fate = int(dice.integers(7))
        if fate == 0:
            return bytes(changed[:at])
        if fate == 1:
            changed[at] = int(dice.integers(256))
        elif fate == 2:
            number = COUNTS[int(dice.integers(len(COUNTS)))]
            form = "<Q" if dice.random() < 0.5 else "<I"
            packed = struct.pack(form, number & (2 ** (8 * struct.calcsize(form)) - 1))
            changed[at : at + len(packed)] = packed
        elif fate == 3:
            changed[at:at] = changed[at : at + int(dice.integers(1, 60))]
        elif fate == 4:
            del changed[at : at + int(dice.integers(1, 60))]
        elif fate == 5:
            changed[at:at] = b"\xff" * 9 + b"\x01"  # the longest protobuf number
        else:
            changed[at] ^= 1 << int(dice.integers(8))
        return bytes(changed)


def fuzz_files(files: int, seed: int, read: Callable[[Path], object] = read_file) -> Finding:
    """Mutated files through `read`.

    Raises:
        AssertionError: a fault of the reader's own, or more than a second; it names seed and number of the file.
    """
    found, process, before = Finding(), psutil.Process(), 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mutator = FileMutator(seed, right_files(folder))
        for number in range(files):
            if number == int(files * WARM_UP):
                gc.collect()
                before = process.memory_info().rss
            suffix, content = mutator.file()
            path = folder / f"file{suffix}"
            path.write_bytes(content)
            begun = time.process_time()
            try:
                read(path)
                outcome = "read"
            except FormatError:
                outcome = "refused: damaged"
            except HycoError:
                outcome = "refused: unknown"
            except Exception as error:
                raise AssertionError(f"file {number} of seed {seed} ({suffix}): {content[:200].hex()}") from error
            took = time.process_time() - begun
            assert took < LIMIT_S, f"file {number} of seed {seed} ({suffix}) took {took:.1f} s"
            found.files += 1
            found.slowest_s = max(found.slowest_s, took)
            found.outcomes[f"{suffix} {outcome}"] += 1
    gc.collect()
    found.growth_mb, found.seconds = (process.memory_info().rss - before) / MB, time.perf_counter() - started
    return found


def fuzz_binaries(files: int, seed: int, binary: Path) -> Finding:
    """Mutated context binaries: whatever the vendor's library does with one, the answer is facts or a refusal."""
    found, started = Finding(), time.perf_counter()
    mutator = FileMutator(seed, {".bin": binary.read_bytes()})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file.bin"
        for _ in range(files):
            path.write_bytes(mutator.changed(".bin"))
            try:
                read_file(path)
                outcome = "read"
            except HycoError as error:
                outcome = f"refused: {type(error).__name__}"
            found.files += 1
            found.outcomes[f".bin {outcome}"] += 1
    found.seconds = time.perf_counter() - started
    return found


def compiled(folder: Path) -> Path:
    """A small context binary."""
    model = two_layer_mlp().save(folder / "mlp.onnx")
    return compile_context(model, folder, "mlp", TARGETS["sm8850"], folder / "compile.log").binary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--binaries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261011)
    options = parser.parse_args()
    found = fuzz_files(options.files, options.seed)
    print(
        f"{found.files:,} files in {found.seconds:.0f} s, the slowest {1000 * found.slowest_s:.0f} ms of CPU time, "
        f"memory {found.growth_mb:+.1f} MB after warm-up"
    )
    with tempfile.TemporaryDirectory() as name:
        binaries = fuzz_binaries(options.binaries, options.seed, compiled(Path(name)))
    for outcome, count in sorted((found.outcomes + binaries.outcomes).items()):
        print(f"  {outcome:32}{count:>10,}")
    assert found.growth_mb < 32.0, "memory grew"


if __name__ == "__main__":
    main()
