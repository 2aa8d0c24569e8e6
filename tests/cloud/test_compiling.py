"""A graph compiled by AI Hub."""

import json
from pathlib import Path

import pytest

from hyco_export.cloud.client import HubError
from hyco_export.cloud.compiling import compile_graph
from hyco_export.cloud.jobs import find_device
from tests.cloud.test_client import SM8850, mlp_on_a_phone
from tests.support import fake_hub
from tests.support.fake_hub import PHONES, TOKEN, FakeHub


def test_a_graph_is_compiled_there_and_read_back(tmp_path: Path) -> None:
    hub, model, spec, _ = mlp_on_a_phone(tmp_path)
    device = find_device(hub, PHONES[0].name, SM8850)
    (tmp_path / "out").mkdir()
    info = compile_graph(hub, device, model, spec, SM8850, "2.50", tmp_path / "out", lambda *_: None)
    assert (info.htp_arch, info.soc_model) == (81, 87)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".onnx", ".bin"}
    options = next(named["options"] for method, _, named in hub.calls if method == "submit_compile_job")
    assert options == "--target_runtime precompiled_qnn_onnx --qairt_version 2.50"
    (tmp_path / "hub2").mkdir()
    other = FakeHub(folder=tmp_path / "hub2", target="sm8750")
    with pytest.raises(Exception, match="is for v79/SoC 69, asked for v81/SoC 87"):
        compile_graph(other, device, model, spec, SM8850, None, tmp_path / "out", lambda *_: None)
    failing = FakeHub(fails="QNN_GRAPH_ERROR: Failed to finalize QNN graph. Error code: 1002")
    with pytest.raises(HubError, match="refuses an operator of mlp"):
        compile_graph(failing, device, model, spec, SM8850, None, tmp_path / "out", lambda *_: None)
    busy = FakeHub(raises={"submit_compile_job": fake_hub.quota()})
    with pytest.raises(HubError, match="takes no more jobs"):
        compile_graph(busy, device, model, spec, SM8850, None, tmp_path / "out", lambda *_: None)
    assert TOKEN not in json.dumps([path.read_bytes().hex() for path in (tmp_path / "out").iterdir()])
