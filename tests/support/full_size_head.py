"""Measures the head at full size: emission, compilation, one draft in the emulator; a command, not a test.

    python -m tests.support.full_size_head OUT [--small] [--projected] [--emulate]

Prints one JSON object. Emulating takes about two minutes on two cores.
"""

import argparse
import resource
import time
from pathlib import Path

import msgspec
import numpy as np
import onnx

from hyco_export.core.network import head as network_head
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.network.weights import project_table
from hyco_export.core.targets import TARGETS
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.graph.qnn import compile_context, open_context
from tests.support.random_head import FULL_SIZE, SMALL, HeadParts, calibrate, random_head, random_table

BYTES_PER_MB = 1e6
BYTES_PER_KB = 1024  # of getrusage
STEPS, RUNNER_UPS = 4, 2
TARGET = TARGETS["sm8850"]


def rss_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_KB / BYTES_PER_MB)


def measure(out: Path, small: bool, projected: bool, emulate: bool) -> dict[str, object]:
    sizes = SMALL if small else FULL_SIZE
    found: dict[str, object] = {"projected_table": projected}
    start_s = time.perf_counter()
    stored = random_head(sizes)
    network = HeadNetwork(stored.architecture, STEPS, RUNNER_UPS, sizes.window, "post", 1e-6)
    kept = np.arange(sizes.kept, dtype=np.int32)
    weights = stored.device_weights(kept, random_table(sizes), None)
    if projected:
        network = msgspec.structs.replace(network, projected_table=True)
        weights, found["table_sqnr_db"] = project_table(weights)
    parts = calibrate(network, weights, sizes, roots=2)
    del stored, weights
    found["calibrate_s"], found["calibrate_peak_mb"] = round(time.perf_counter() - start_s), rss_mb()
    model, ops = emit(parts, out)
    found["emit_s"], found["emit_peak_mb"] = round(time.perf_counter() - start_s), rss_mb()
    found["onnx_mb"] = round(model.stat().st_size / BYTES_PER_MB)
    context = compile_context(model, out, "head", TARGET, out / "compile.log")
    found |= {
        "binary_mb": round(context.binary_bytes / BYTES_PER_MB, 1),
        "compile_s": round(context.wall_s, 1),
        "compile_cpu_s": round(context.cpu_s, 1),
        "compile_peak_mb": round(context.peak_rss_bytes / BYTES_PER_MB),
    }
    feeds = parts.feeds(ops)[-1]
    float_ids = parts.float_head.draft(parts.real_feeds[-1])
    found["float"] = {name: ids.ravel().tolist() for name, ids in float_ids.items()}
    del parts, ops
    reference = ReferenceSession(model, threads=2)
    found["cpu"] = {name: ids.tolist() for name, ids in reference.run(feeds).items()}
    if emulate:
        del reference
        with open_context(context.context_model, TARGET, out / "emulate.log") as session:
            start_s = time.perf_counter()
            found["emulator"] = {name: ids.tolist() for name, ids in session.run(feeds).items()}
            found["emulate_s"] = round(time.perf_counter() - start_s)
    return found


def emit(parts: HeadParts, out: Path) -> tuple[Path, QdqOps]:
    ops = QdqOps("head", parts.weights, parts.encodings)
    network_head.build(ops, parts.network)
    model, path = ops.model(), out / "head.onnx"
    require_clean(model, "head")
    onnx.save(model, path)
    return path, ops


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    for flag in ("small", "projected", "emulate"):
        parser.add_argument(f"--{flag}", action="store_true")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    print(msgspec.json.encode(measure(chosen.out, chosen.small, chosen.projected, chosen.emulate)).decode())
