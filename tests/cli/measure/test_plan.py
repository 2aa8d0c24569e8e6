"""`plan`: where its parts come from, what it prints and writes."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.measure.plan import CURVE_FIELD, Places, gathered, plan_run
from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.inputs import paper_inputs
from hyco_export.evaluate.planning.simulation import Options

NOWHERE = Places(None, None, (), None, None, None, None)
DIRECT = ConnectOptions()


def places(**fields) -> Places:
    return msgspec.structs.replace(NOWHERE, **fields)


def test_without_traces_it_plans_with_the_papers_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    plan_run(NOWHERE, Options(answers=3), DIRECT, out)
    shown = capsys.readouterr().out
    assert "hyco-2p" in shown
    assert "least server time: hyco-2p" in shown
    assert "assumed: answers of 500 tokens" in shown
    written = json.loads(out.read_text())
    assert [row["system"] for row in written["outcomes"]] == list(paper_inputs().systems)
    assert written["inputs"]["device"]["slm_pass_ms"] == 15.7
    assert {choice["aim"] for choice in written["choices"]} == {"g", "delivery", "bytes", "battery"}


def test_the_inputs_of_a_written_plan_are_such_a_file(tmp_path: Path) -> None:
    out, again = tmp_path / "plan.json", tmp_path / "inputs.json"
    plan_run(places(baseline="hyco"), Options(answers=1), DIRECT, out)
    again.write_text(json.dumps(json.loads(out.read_text())["inputs"]))
    assert gathered(places(files=(again,)), DIRECT) == gathered(places(baseline="hyco"), DIRECT)


def test_each_part_may_come_from_elsewhere(tmp_path: Path) -> None:
    phone, curve = tmp_path / "phone.yaml", tmp_path / "curve.json"
    phone.write_text("device: {head_ms: 9.0, slm_pass_ms: 4.0}\n")
    curve.write_text("[[5, 10.0], [33, 12.0]]")
    found = gathered(places(files=(phone,), link="wifi", server=str(curve), answer_tokens=90, baseline="hyco"), DIRECT)
    assert found.device.head_ms == 9.0
    assert found.link.name == "wifi"
    assert found.workload.first_token_ms is None  # was seen over the paper's link
    assert all(one.first_token_ms is None for one in found.systems.values())
    assert found.server.pass_ms == ((5.0, 10.0), (33.0, 12.0))
    assert found.server.head_ms == paper_inputs().server.head_ms
    assert found.workload.answer_tokens == 90
    assert next(iter(found.systems)) == "hyco"
    assert set(found.systems) == set(paper_inputs().systems)
    assert str(curve) in found.assumed[-1]


def test_a_server_that_says_its_curve_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(**{CURVE_FIELD: [[1, 5.0], [33, 9.0]]})
    monkeypatch.setattr(
        "hyco_export.cli.connection.transport_to", lambda *a, **k: (SimpleNamespace(info=lambda: info), None)
    )
    assert gathered(places(server="http://127.0.0.1:1"), DIRECT).server.pass_ms == ((1.0, 5.0), (33.0, 9.0))
    setattr(info, CURVE_FIELD, [])
    with pytest.raises(HycoError, match="says nothing of the time its passes take"):
        gathered(places(server="http://127.0.0.1:1"), DIRECT)


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(HycoError, match="--baseline plain is not among the systems"):
        gathered(places(baseline="plain"), DIRECT)


def test_a_folder_of_traces_keeps_its_own_plan(tmp_path: Path) -> None:
    (tmp_path / "progress.json").touch()
    with pytest.raises(HycoError, match="holds traces, whose own plan"):
        plan_run(NOWHERE, Options(answers=1), DIRECT, tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_a_server_that_does_not_answer_is_told_by_its_option() -> None:
    with pytest.raises(HycoError, match="no answer") as refused:
        gathered(places(server="http://127.0.0.1:9"), DIRECT)
    assert refused.value.hint == "start the server, or give --server-times a file"
