"""The map of two vocabularies on disk."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.token_bridge import TokenBridge, read_bridge, write_bridge
from hyco_export.errors import ArtifactError

BRIDGE = TokenBridge(np.array([5, 2]), np.array([0, 3]), np.array([0, 1, 3, 4]), np.array([0, 3, 3, 1]))


def test_what_was_written_is_read(tmp_path):
    write_bridge(tmp_path / "b", BRIDGE)
    found = read_bridge(tmp_path / "b")
    assert all(np.array_equal(getattr(found, name), value) for name, value in vars(BRIDGE).items())
    assert found.vocab_size == 3
    assert found.read(1).tolist() == [3, 3]
    assert found.read_all([2, 0, 1]).tolist() == [1, 0, 3, 3]
    assert found.read_all([]).tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafter_ids": np.array([3, 0])},
        {"verifier_ids": np.array([5])},
        {"offsets": np.array([0, 1, 1, 4])},
        {"offsets": np.array([0, 1, 3, 9])},
    ],
)
def test_lists_that_do_not_fit_are_refused(tmp_path, wrong):
    save_file({name: np.asarray(value) for name, value in (vars(BRIDGE) | wrong).items()}, tmp_path / "b")
    with pytest.raises(ArtifactError, match="its lists do not fit"):
        read_bridge(tmp_path / "b")


@pytest.mark.parametrize("content", [None, b"x" * 40])
def test_a_missing_or_damaged_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "b").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"b is not a token bridge"):
        read_bridge(tmp_path / "b")
