"""A compiled graph on a phone of AI Hub."""

import logging
from pathlib import Path

import numpy as np
import pytest

from hyco_export.cloud.client import HubError
from hyco_export.cloud.jobs import find_device
from hyco_export.cloud.profile import profile_graph
from hyco_export.graph.parity import ParityLimits
from tests.cloud.test_client import SM8850, compiled_pair, mlp_on_a_phone
from tests.support.fake_hub import PHONES, TOKEN


def test_a_graph_is_profiled_and_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hub, model, spec, feeds = mlp_on_a_phone(tmp_path)
    device, pair = find_device(hub, PHONES[0].name, SM8850), compiled_pair(tmp_path, model)
    found = profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None, tmp_path / "kept")
    assert (found.npu_ms, found.runs, found.peak_memory_bytes) == (1.5, 3, 91_000_000)
    assert found.npu_share == pytest.approx(2 / 3) and found.load_ms == 150.0
    assert [(one.name, one.equal_share, one.passed) for one in found.outputs] == [("y", 1.0, True)]
    assert set(np.load(tmp_path / "kept" / "1.npz")) == {"y"}
    exact = hub.compute

    def wrong(pair, inputs):
        return {"y": [y ^ np.uint16(1 << 14) for y in exact(pair, inputs)["y"]]}

    hub.compute = wrong
    found = profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None)
    assert not found.outputs[0].passed
    hub.compute = lambda pair, inputs: {"y": [np.zeros((4, 32), np.float32)] * 2}
    with pytest.raises(HubError, match=r"came back as float32 \[4, 32\], not uint16"):
        profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None)
    hub.compute = lambda pair, inputs: {"y": [np.zeros((4, 32), np.uint16)]}
    with pytest.raises(HubError, match="gave 1 of 2 values of output y"):
        profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None)
    hub.compute, hub.profile = exact, {}
    with pytest.raises(HubError, match="measured no time of mlp"):
        profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None)
    assert TOKEN not in caplog.text
