"""Every SLM tensor gets the grid the rules say."""

import numpy as np

from hyco_export.core.network.quantisation import WIDE_KV_ROOM, kv_range_names, rewidened, slm_encodings
from tests.core.network.test_host import network

RANGES = {
    "hidden": (-1.0, 3.0),
    "k_new.0": (-2.0, 2.0),
    "v_new.0": (-1.0, 1.0),
    "k_new.1": (-4.0, 4.0),
    "v_new.1": (-3.0, 3.0),
}


def test_grids() -> None:
    assert set(kv_range_names(network())) == set(RANGES) - {"hidden"}  # layer 2 reads layer 1's
    found = slm_encodings(network(), RANGES, margin=1.5, kv_margin=1.2, mask_value=-100.0)
    assert found["k_new.1"] == found["k.1"]
    assert (found["k.1"].dtype, found["k.1"].zero_point) == ("uint8", 128)
    assert np.isclose(found["k.1"].scale * 127, 1.2 * 4.0)
    wide = slm_encodings(network(), RANGES, 1.5, 1.2, -100.0, {"v.1"})
    assert {name for name in found if wide[name] != found[name]} == {"v.1", "v_new.1"}
    assert wide["v.1"] == wide["v_new.1"]
    assert (wide["v.1"].dtype, wide["v.1"].zero_point) == ("uint16", 32768)
    assert np.isclose(wide["v.1"].scale * 32767, WIDE_KV_ROOM * 1.2 * 3.0)
    for name in ("v.1", "k.1"):
        assert np.isclose(rewidened(wide[name], False).scale, found[name].scale)
        assert np.isclose(rewidened(found[name], True).scale, WIDE_KV_ROOM * found[name].scale * 127 / 32767)
    hidden = found["hidden"]
    ends = hidden.dequantize(np.array([0, 65535], np.uint16))
    assert np.allclose(ends, [-1.5, 4.5], atol=hidden.scale)
    assert found["mask.full"].dequantize(np.array([0, 65535], np.uint16)).tolist() == [-100.0, 0.0]
    assert np.abs(found["sin.sliding"].dequantize(np.array([0, 65535], np.uint16))).max() >= 0.9999
