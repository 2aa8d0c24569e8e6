"""A whole run of a seeded family of a few thousand parameters, built by the real stages, and ways to plant faults.

A planted fault is consistent: manifests get the hashes of the altered files, so that only the contents betray it.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from hyco_export.core.artifact import MANIFEST_NAME, file_digest
from hyco_export.core.recipe import Recipe
from hyco_export.evaluate.connect import open_artifacts
from hyco_export.evaluate.diagnosis.diagnose import Checkpoints, diagnose
from hyco_export.evaluate.diagnosis.finding import Diagnosis
from hyco_export.models.verifier import load_tokenizer
from hyco_export.protocol.wire import ServerInfo
from hyco_export.server.assembly import open_server_engine
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.passes.verifier import Verifier
from hyco_export.stages.declarations import Silent, Stage
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import STAGES
from tests.support import builders
from tests.support.packed_slm import save_packed_slm, slm_config

PROMPTS = {"calibration": 4, "validation": 3}
ENDINGS = {
    "calibration": "Say it.",
    "validation": "Say it again.",
    "conversations": "A list?",
}  # no set shares a prompt
WORDS = "a list keeps order and a set does not, say it again, what does a list keep, brackets nest, please "


@dataclass(frozen=True)
class SmallRun:
    """A run folder with its recipe, checkpoints and tokenizer."""

    root: Path
    recipe: Recipe
    checkpoints: Checkpoints
    tokenizer: PreTrainedTokenizerFast

    def serve(self) -> tuple[Engine, ServerInfo]:
        return open_server_engine(self.recipe, self.root)

    def diagnose(self, engine: Engine, info: ServerInfo, tokenizer: PreTrainedTokenizerFast | None = None) -> Diagnosis:
        transport = LocalTransport(engine, info)
        artifacts = open_artifacts(self.root, self.recipe.target)
        chosen = tokenizer or self.tokenizer
        return diagnose(artifacts, self.recipe, self.checkpoints, chosen, transport, info, lambda *_: None)


def build_small_run(folder: Path, stages: Sequence[Stage] = STAGES) -> SmallRun:
    """All stages, the compiler included, or those given, in a new folder."""
    builders.save_family(folder)
    tokenizer = load_tokenizer(folder / "verifier")
    config = slm_config()
    config.vocab_size = config.vocab_size_per_layer_input = len(tokenizer)
    save_packed_slm(folder / "slm", config)
    tokenizer.save_pretrained(folder / "slm")
    _write_conversations(folder)
    build_all(RunFolder(folder / "run", _recipe(folder), folder), stages, Silent())
    return open_small_run(folder)


def open_small_run(folder: Path) -> SmallRun:
    """What `build_small_run` left in a folder."""
    checkpoints = Checkpoints(*(folder / name for name in ("verifier", "head", "slm")))
    return SmallRun(folder / "run", _recipe(folder), checkpoints, load_tokenizer(folder / "verifier"))


def _write_conversations(folder: Path) -> None:
    for split, count in (*PROMPTS.items(), ("conversations", 8)):
        lines = [
            {
                "id": f"{split}-{index}",
                "messages": [
                    {"role": "user", "content": f"{builders.TEXTS[index % len(builders.TEXTS)]} {ENDINGS[split]}"},
                    {"role": "assistant", "content": WORDS},
                ],
            }
            for index in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _recipe(folder: Path) -> Recipe:
    import msgspec

    models: dict[str, Any] = {
        name: {"model": str(folder / name), "dtype": "float32"} for name in ("verifier", "head", "slm")
    }
    data = {name: str(folder / f"{name}.jsonl") for name in ("calibration", "validation", "conversations")}
    raw = {
        "name": "small",
        "threads": 1,
        "models": models,
        "data": data,
        "keepset": {"size": 300, "scripts": []},
        "capture": {"max_new_tokens": 30, "validation_max_new_tokens": 40},
        "qat": {"steps": 2, "warmup_steps": 1, "autocast": "float32", "learning_rate": 1e-4},
        "head": {"steps": 3, "runner_up_steps": 1, "window": 48},
        "slm": {"rows": 6, "prefill_rows": 8, "ring": 12, "sliding_ring": 8},
        "compile": {"emulated_feeds": 0},
        "drafting": {"budget": 8, "candidates_per_row": 4},
        "validation": {"prompts": 3, "gates": {"min_head_tokens": 0.0}},
    }
    return msgspec.convert(raw, Recipe)


Edit = Callable[[Path], None]


def plant(run: SmallRun, folder: Path, edit: Edit) -> SmallRun:
    """A copy of the run folder that `edit` altered, with manifests that say so of nothing."""
    root = folder / "planted"
    shutil.copytree(run.root, root, copy_function=os.link)
    edit(root)
    for path in root.glob(f"*/{MANIFEST_NAME}"):
        manifest = json.loads(path.read_bytes())
        for name, record in manifest["files"].items():
            record |= {"size_bytes": (path.parent / name).stat().st_size, "sha256": file_digest(path.parent / name)}
        _replace(path, json.dumps(manifest).encode())
    return SmallRun(root, run.recipe, run.checkpoints, run.tokenizer)


def _replace(path: Path, content: bytes) -> None:
    """The copy shares its files with the run it was made from: unlink before writing."""
    path.unlink()
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    _replace(path, json.dumps(content).encode())


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    with safe_open(path, framework="numpy") as stored:
        metadata = stored.metadata()
    tensors = dict(load_file(path))
    change(tensors)
    path.unlink()
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, path, metadata=metadata)


def edit_graph(path: Path, change: Callable[[dict[str, onnx.TensorProto]], None]) -> None:
    model = onnx.load(path)
    change({tensor.name: tensor for tensor in model.graph.initializer})
    path.unlink()
    onnx.save(model, path)


def verifier_of(engine: Engine) -> Verifier:
    """The models behind an engine, to alter them in place."""
    return engine._open_session.__self__  # type: ignore[attr-defined]
