"""Outputs with planted faults: each is found, and called by its name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from hyco_export.bundle.compare import EQUAL, compare
from hyco_export.bundle.spec import EMULATOR, INTEGER, Bundle, load_arrays, read_bundle
from hyco_export.cli.bundle import compare_outputs
from hyco_export.errors import ArtifactError

Feeds = dict[str, np.ndarray]
TREE, PREFILL, HEAD = "slm_tree", "slm_prefill", "head"


def device(
    folder: Path,
    out: Path,
    graph: str,
    feed: Callable[[Feeds, Bundle], None] = lambda feeds, bundle: None,
    read: Callable[[Feeds, Bundle], Any] = lambda outputs, bundle: None,
) -> Path:
    """What qnn-net-run would leave of one graph on a device whose app errs: `feed` and `read` alter arrays."""
    bundle = read_bundle(folder)
    session = ort.InferenceSession(str(folder / bundle.graphs[graph].integer_graph), _as_written())
    names = [tensor.name for tensor in bundle.graphs[graph].outputs]
    for number, case in enumerate(case for case in bundle.cases if case.graph == graph):
        feeds = load_arrays(folder, case.inputs, [tensor.spec for tensor in bundle.graphs[graph].inputs])
        feed(feeds, bundle)
        outputs = dict(zip(names, session.run(names, feeds), strict=True))
        read(outputs, bundle)
        place = out / graph / f"Result_{number}"
        place.mkdir(parents=True)
        for name, values in outputs.items():
            np.ascontiguousarray(values).tofile(place / f"{name.replace('.', '_')}_native.raw")
    return out


def _as_written() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def test_the_integer_graphs_own_outputs_pass(bundle_folder: Path, tmp_path: Path) -> None:
    for graph in (HEAD, TREE, PREFILL):
        device(bundle_folder, tmp_path, graph)
    found = compare(bundle_folder, tmp_path)
    assert found.passed and not found.causes and not found.notes
    assert len(found.tensors) > 100 and {one.origin for one in found.tensors} == {EMULATOR}
    assert compare_outputs(bundle_folder, tmp_path) == 0


def test_the_emulators_outputs_are_equal(bundle_folder: Path, tmp_path: Path) -> None:
    bundle = read_bundle(bundle_folder)
    for case in bundle.cases:
        specs = [tensor.spec for tensor in bundle.graphs[case.graph].outputs]
        np.savez(tmp_path / f"{case.id}.npz", **load_arrays(bundle_folder, case.outputs[EMULATOR], specs))
    found = compare(bundle_folder, tmp_path)
    assert {one.verdict for one in found.tensors} == {EQUAL}


def test_a_folder_of_other_things_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no outputs of this bundle's golden vectors"):
        compare(bundle_folder, tmp_path)


def test_a_damaged_bundle_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    name = read_bundle(copy).cases[0].outputs[INTEGER]["chain"]
    (copy / name).write_bytes(b"\0" * 3)
    with pytest.raises(ArtifactError, match="has 3 B"):
        compare(copy, tmp_path)
