"""Sample feeds survive the disk in order, and a missing file is named."""

import numpy as np
import pytest

from hyco_export.core.golden import read_samples, write_samples
from hyco_export.errors import ArtifactError


def test_feeds_come_back_by_graph_in_order(tmp_path):
    rng = np.random.default_rng(0)
    tree = [
        {"e": rng.integers(0, 255, (1, 4), np.uint8), "mask.full": rng.integers(0, 9, (1, 3), np.uint16)} for _ in "abc"
    ]
    prefill = [{"embeds": rng.integers(0, 9, (2, 2), np.uint16)}]
    write_samples(tmp_path / "samples.safetensors", {"tree": tree, "prefill": prefill})

    found = read_samples(tmp_path / "samples.safetensors")

    assert {graph: len(feeds) for graph, feeds in found.items()} == {"tree": 3, "prefill": 1}
    for wanted, given in zip([*tree, *prefill], [*found["tree"], *found["prefill"]], strict=True):
        assert wanted.keys() == given.keys()
        for name, values in wanted.items():
            assert given[name].dtype == values.dtype
            np.testing.assert_array_equal(given[name], values)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"none\.safetensors"):
        read_samples(tmp_path / "none.safetensors")
