"""Outputs with planted faults: each is found, and called by its name."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from hyco_export.bundle.compare import EQUAL, OUTSIDE, Comparison, compare
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


def rings(feeds: Feeds) -> list[str]:
    return [name for name in feeds if name[:2] in ("k.", "v.")]


def words(found: Comparison, graph: str) -> str:
    assert not found.passed
    return " | ".join(found.causes[graph])


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


def _shifted_rings(feeds: Feeds, bundle: Bundle) -> None:
    for name in rings(feeds):
        feeds[name] = np.roll(feeds[name], 1, axis=1)


def _transposed_rotary(feeds: Feeds, bundle: Bundle) -> None:
    for name in [name for name in feeds if name[:4] in ("cos.", "sin.")]:
        feeds[name] = feeds[name].T.copy().reshape(feeds[name].shape)


def _exchanged_rotary(feeds: Feeds, bundle: Bundle) -> None:
    for name in [name for name in feeds if name.startswith("cos.")]:
        other = name.replace("cos", "sin")
        feeds[name], feeds[other] = feeds[other], feeds[name]


def _wrong_zero_point(feeds: Feeds, bundle: Bundle) -> None:
    spec = next(one for one in bundle.graphs[TREE].inputs if one.name == "embeds")
    feeds["embeds"] = np.clip(feeds["embeds"].astype(np.int64) + 32768 - spec.zero_point, 0, 65535).astype(np.uint16)


def _inverted_masks(feeds: Feeds, bundle: Bundle) -> None:
    for name in [name for name in feeds if name.startswith("mask.")]:
        feeds[name] = (feeds[name].max() - feeds[name]).astype(feeds[name].dtype)


@pytest.mark.parametrize(
    ("feed", "expected"),
    [
        (_shifted_rings, "rings: every row is one slot too far"),
        (_transposed_rotary, "rotary tables: transposed"),
        (_exchanged_rotary, "rotary tables: cos and sin are exchanged"),
        (_wrong_zero_point, "embeds: wrong zero point, 32768 was taken for"),
        (_inverted_masks, "masks: visible and hidden are exchanged"),
    ],
)
def test_a_fault_of_the_inputs_is_named(bundle_folder: Path, tmp_path: Path, feed: Any, expected: str) -> None:
    found = compare(bundle_folder, device(bundle_folder, tmp_path, TREE, feed))
    assert expected in words(found, TREE)


def test_a_fault_of_the_heads_inputs_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    def feed(feeds: Feeds, bundle: Bundle) -> None:
        specs = {one.name: one for one in bundle.graphs[HEAD].inputs}
        real = (feeds["h"].astype(np.float64) - specs["h"].zero_point) * specs["h"].scale
        feeds["h"] = np.clip(np.rint(real / specs["e"].scale) + specs["h"].zero_point, 0, 255).astype(np.uint8)

    assert "h: wrong scale, that of e" in words(
        compare(bundle_folder, device(bundle_folder, tmp_path, HEAD, feed)), HEAD
    )


def _zeroed(outputs: Feeds, bundle: Bundle) -> None:
    outputs["k_new.0"] = np.zeros_like(outputs["k_new.0"])


def _swapped_scale(outputs: Feeds, bundle: Bundle) -> None:
    specs = {one.name: one for one in bundle.graphs[TREE].outputs}
    k, v = specs["k_new.0"], specs["v_new.0"]
    real = (outputs["v_new.0"].astype(np.float64) - v.zero_point) * v.scale
    outputs["v_new.0"] = np.clip(np.rint(real / k.scale) + v.zero_point, 0, 255).astype(np.uint8)


def _moved_zero_point(outputs: Feeds, bundle: Bundle) -> None:
    outputs["logits"] = np.clip(outputs["logits"].astype(np.int64) - 7000, 0, 65535).astype(np.uint16)


def _transposed_logits(outputs: Feeds, bundle: Bundle) -> None:
    outputs["logits"] = outputs["logits"].T.copy()


def _big_endian(outputs: Feeds, bundle: Bundle) -> None:
    outputs["logits"] = outputs["logits"].byteswap()


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (_zeroed, "k_new.0: every element is 0: the buffer was never written"),
        (_swapped_scale, "wrong scale"),
        (_moved_zero_point, r"logits: every integer is -(69|70)\d\d off: wrong zero point"),
        (_transposed_logits, r"logits: it is written with its axes in the order \[1, 0\]"),
        (_big_endian, "logits: its bytes are in the other order"),
    ],
)
def test_a_fault_of_reading_is_named(bundle_folder: Path, tmp_path: Path, read: Any, expected: str) -> None:
    found = compare(bundle_folder, device(bundle_folder, tmp_path, TREE, read=read))
    assert re.search(expected, words(found, TREE))
    assert len(found.causes[TREE]) == 1
    assert sum(one.verdict == OUTSIDE for one in found.tensors) > 0 and compare_outputs(bundle_folder, tmp_path) == 1


def test_float_outputs_are_quantised_again(bundle_folder: Path, tmp_path: Path) -> None:
    def read(outputs: Feeds, bundle: Bundle) -> None:
        for spec in bundle.graphs[TREE].outputs:
            outputs[spec.name] = ((outputs[spec.name].astype(np.float64) - spec.zero_point) * spec.scale).astype("<f4")

    found = compare(bundle_folder, device(bundle_folder, tmp_path, TREE, read=read))
    assert found.passed and any("float32" in note for note in found.notes)


def test_a_missing_and_a_truncated_file_are_named(bundle_folder: Path, tmp_path: Path) -> None:
    device(bundle_folder, tmp_path, TREE)
    (tmp_path / TREE / "Result_0" / "v_new_0_native.raw").unlink()
    cut = tmp_path / TREE / "Result_1" / "logits_native.raw"
    cut.write_bytes(cut.read_bytes()[:-2])
    found = compare(bundle_folder, tmp_path)
    assert "v_new.0: missing: the device gave no such output" in words(found, TREE)
    assert "truncated: logits_native.raw has" in words(found, TREE)


def test_answers_in_another_order_are_named(bundle_folder: Path, tmp_path: Path) -> None:
    device(bundle_folder, tmp_path, PREFILL)
    first, second = (tmp_path / PREFILL / f"Result_{number}" for number in (0, 1))
    places = sorted((tmp_path / PREFILL).glob("Result_*"), key=lambda path: int(path.name.partition("_")[2]))
    for number, place in enumerate(places):
        place.rename(place.with_name(f"moved_{(number + 1) % len(places)}"))
    for place in (tmp_path / PREFILL).glob("moved_*"):
        place.rename(place.with_name(place.name.replace("moved", "Result")))
    assert first.is_dir() and second.is_dir()
    assert "in another order than the input list" in words(compare(bundle_folder, tmp_path), PREFILL)


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
