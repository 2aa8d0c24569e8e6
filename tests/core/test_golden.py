"""Golden positions on disk, and how acceptance is counted."""

import pytest

from hyco_export.core.golden import (
    Golden,
    GoldenRoot,
    GoldenSession,
    GoldenText,
    acceptance_by_depth,
    accepted_length,
    read_golden,
    write_golden,
)
from hyco_export.errors import ArtifactError


def test_what_was_written_is_read(tmp_path):
    root = GoldenRoot(9, ((4, 2), (7, 1)), ((0.5, 0.25), (1.5, 1.0)), 1)
    golden = Golden(2, 64, (0.5, 0.25), 1.0, (GoldenText((), (1, 2)),), (GoldenSession(0, (root, root)),))
    write_golden(tmp_path, golden)
    assert read_golden(tmp_path) == golden
    assert golden.root_count == 2 and root.chain == (4, 7)


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
