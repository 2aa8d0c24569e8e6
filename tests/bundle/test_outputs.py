"""Layouts in which outputs come back from a device."""

from pathlib import Path

import numpy as np

from hyco_export.bundle.compare import Comparison, compare
from hyco_export.bundle.spec import Bundle
from tests.bundle.test_compare import PREFILL, TREE, Feeds, device


def words(found: Comparison, graph: str) -> str:
    assert not found.passed
    return " | ".join(found.causes[graph])


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
