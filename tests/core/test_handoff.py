"""The hand-off's sizes (the paper's figures) and byte layout."""

import numpy as np
import pytest

from hyco_export.core.handoff import HandoffSpec, KvRows, KvShape


def test_sizes_of_gemma_4_26b_a4b() -> None:
    spec = HandoffSpec(2816, 1024, "pre", {"sliding": KvShape(8, 256), "full": KvShape(2, 512)}, {})
    assert spec.round_bytes == 5632
    assert spec.row_bytes == 6144
    assert spec.row_bytes * spec.window == pytest.approx(6.3e6, rel=0.01)


def test_rows_survive_packing_and_the_layout_is_row_major() -> None:
    spec = HandoffSpec(8, 4, "post", {"sliding": KvShape(2, 3), "full": KvShape(1, 5)}, {})
    generator = np.random.default_rng(0)
    shapes = {"sliding": (4, 2, 3), "full": (4, 1, 5)}
    rows = KvRows(
        {t: generator.integers(0, 256, s, dtype=np.uint8) for t, s in shapes.items()},
        {t: generator.integers(0, 256, s, dtype=np.uint8) for t, s in shapes.items()},
    )
    payload = spec.pack_rows(rows)
    assert len(payload) == 4 * spec.row_bytes
    assert payload[: 2 * 3] == rows.k["sliding"][0].tobytes()
    assert payload[spec.row_bytes - 5 : spec.row_bytes] == rows.v["full"][0].tobytes()
    back = spec.unpack_rows(payload)
    for layer_type in shapes:
        np.testing.assert_array_equal(back.k[layer_type], rows.k[layer_type])
        np.testing.assert_array_equal(back.v[layer_type], rows.v[layer_type])
    with pytest.raises(ValueError, match="not a multiple of 22 B"):
        spec.unpack_rows(payload[:-1])
