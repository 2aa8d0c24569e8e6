"""Planted faults of filling and reading a graph, each named by what came back."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyco_export.bundle.compare import OUTSIDE, compare
from hyco_export.bundle.spec import Bundle
from hyco_export.cli.bundle import compare_outputs
from tests.bundle.test_compare import HEAD, TREE, Feeds, device
from tests.bundle.test_outputs import words


def rings(feeds: Feeds) -> list[str]:
    return [name for name in feeds if name[:2] in ("k.", "v.")]


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
