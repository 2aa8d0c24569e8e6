"""The pass masks against the definition of visibility."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.core.ring import ancestor_mask, visible
from hyco_export.protocol.tree import depths
from hyco_export.server.passes.attention import attention_mask


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(0, 20),
    window=st.one_of(st.none(), st.integers(1, 9)),
    wanted=st.lists(st.integers(0, 50), max_size=12),
    slack=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_sees_its_ancestors_and_the_committed_positions_in_its_window(
    length: int, window: int | None, wanted: list[int], slack: int, dtype: torch.dtype
) -> None:
    parents = [choice % (row + 1) - 1 for row, choice in enumerate(wanted)]
    rows = len(parents) + 1
    row_depths = np.concatenate([[0], depths(parents)])
    block = np.zeros((rows, rows), bool)
    block[:, 0] = True
    block[1:, 1:] = ancestor_mask(parents)
    # older keys than any row sees may be given; they must be hidden
    first = 0 if window is None else max(0, length - window + 1 - slack)
    mask = attention_mask(block, row_depths, length, first, window, dtype, torch.device("cpu"))
    assert mask.shape == (1, 1, rows, length - first + rows) and mask.dtype == dtype

    positions = length + row_depths
    past = visible(positions, np.arange(first, length), window)
    among = block & visible(positions, positions, window)
    seen = np.concatenate([past, among], axis=1)
    assert np.array_equal((mask[0, 0] == 0).numpy(), seen)
    assert np.all(mask[0, 0].float().numpy()[~seen] == torch.finfo(dtype).min)
    assert seen.diagonal(length - first).all()  # a row sees itself: no softmax over nothing
