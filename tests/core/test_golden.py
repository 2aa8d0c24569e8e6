"""Golden positions and sample feeds on disk, and how acceptance is counted."""

import msgspec
import numpy as np
import pytest

from hyco_export.core.golden import (
    Golden,
    GoldenDistribution,
    GoldenDraw,
    GoldenRoot,
    GoldenSession,
    GoldenText,
    GoldenTree,
    acceptance_by_depth,
    accepted_length,
    read_golden,
    read_samples,
    write_golden,
    write_samples,
)
from hyco_export.errors import ArtifactError


def test_what_was_written_is_read(tmp_path):
    root = GoldenRoot(9, ((4, 2), (7, 1)), ((0.5, 0.25), (1.5, 1.0)), 1, (4, 2))
    likely = GoldenDistribution(
        1.0, 2, 0.9, (-0.5, -1.5), (0.7, 0.3), (3.0, 0.1), (1.1,), 0.8, (GoldenDraw(7, 0.3, (9,), (0.2,)),)
    )
    seldom = msgspec.structs.replace(likely, temperature=1.5, root_prob=0.6)
    tree = GoldenTree((1, 2), 4, (7, 9), (-1, -1), None, (3.0, 2.0), (3.0, 2.0), (likely, seldom))
    session = GoldenSession(0, (root, root))
    golden = Golden(2, 64, (0.5, 0.25), 1.0, (GoldenText((), (1, 2)),), (session,), (tree,))
    write_golden(tmp_path, golden)
    assert read_golden(tmp_path) == golden
    assert golden.root_count == 2 and root.chain == (4, 7)
    assert tree.rows == (0,) and tree.root_prob == 0.6


def test_a_folder_without_golden_positions_names_the_command(tmp_path):
    with pytest.raises(ArtifactError, match=r"golden\.json cannot be read") as caught:
        read_golden(tmp_path)
    assert caught.value.hint == "build it again: hyco-export convert-head"


@pytest.mark.parametrize(
    ("chain", "following", "length"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (3, 2), 0), ((1, 2, 3), (1, 2), 2), ((), (1,), 0)],
)
def test_a_chain_is_taken_up_to_its_first_wrong_token(chain, following, length):
    assert accepted_length(chain, following) == length


def test_acceptance_counts_chains_that_reach_a_depth():
    assert acceptance_by_depth([0, 1, 3, 3], 3) == (0.75, 0.5, 0.5)
    assert acceptance_by_depth([], 2) == (0.0, 0.0)


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
