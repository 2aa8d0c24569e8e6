"""AI Hub's failures in one line each with the next step, without secrets; and the real client takes our calls."""

import inspect
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import qai_hub
from qai_hub.client import CompileJob, InferenceJob, InternalError, Job, JobStatus, UserError

from hyco_export.cloud import client as module
from hyco_export.cloud.client import HubError, aihub_login, harmless, hub_errors, job_failure, open_client
from hyco_export.cloud.compiling import compile_graph
from hyco_export.cloud.jobs import find_device, wait_for
from hyco_export.cloud.profile import profile_graph
from hyco_export.core.targets import TARGETS
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.parity import ParityLimits, ReferenceSession
from hyco_export.graph.qnn import compile_context
from tests.support import fake_hub
from tests.support.fake_hub import PHONES, TOKEN, FakeHub, FakeJob, States
from tests.support.qdq_builder import two_layer_mlp

SM8850 = TARGETS["sm8850"]


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "client.ini"
    monkeypatch.setenv(module.CONFIG_VARIABLE, str(path))
    return path


def test_the_login_is_looked_for_and_never_shown(no_login: Path) -> None:
    assert aihub_login().found == "not set up"
    with pytest.raises(HubError, match="no AI Hub login") as refused:
        open_client()
    assert "qai-hub configure" in refused.value.hint
    no_login.write_text("[api]\napi_url = x\n")
    assert not aihub_login().configured
    no_login.write_text("not an ini file")
    assert not aihub_login().configured
    no_login.write_text(f"[api]\napi_token = {TOKEN}\n")
    login = aihub_login()
    assert login.configured and TOKEN not in repr(login)


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (fake_hub.no_token(), "does not accept the login", "qai-hub configure"),
        (fake_hub.refused_token(), "does not accept the login", "qai-hub configure"),
        (fake_hub.quota(), "takes no more jobs", "wait until jobs"),
        (InternalError("Could not connect to Qualcomm AI Hub."), "cannot be reached", "network"),
        (InternalError("Qualcomm AI Hub is unavailable right now."), "cannot be reached", "network"),
        (ConnectionError("refused"), "cannot be reached", "network"),
        (UserError(f"{PHONES[0]} is not available."), "offline or no longer offered", "--list-devices"),
        (UserError("Input model type cannot be compiled."), "Input model type cannot be compiled", "correct"),
    ],
)
def test_each_failure_is_one_line_with_the_next_step(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(HubError) as refused, hub_errors("submitting head"):
        raise error
    assert message in refused.value.message and hint in refused.value.hint
    assert "submitting head" in refused.value.message
    assert "\n" not in str(refused.value) and TOKEN not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


def test_secrets_are_taken_out_of_what_the_service_says() -> None:
    said = harmless(
        f"PUT https://bucket.example/model?X-Amz-Signature=abc failed: Authorization: {TOKEN}, api_key={TOKEN}"
    )
    assert TOKEN not in said and "https" not in said and "failed" in said


def test_the_vendors_codes_are_explained_in_failed_jobs() -> None:
    error = job_failure("Device error 5005 in QnnContext_createFromBinary", "head", "jx")
    assert "was not compiled for this target" in error.message and "jx" in error.message
    assert "inspect" in error.hint
    unknown = job_failure("strange", "head", "jx")
    assert "strange" in unknown.message and unknown.hint


def test_states_are_shown_as_they_change() -> None:
    seen: list[str] = []
    job = FakeJob("j", [States.CREATED, States.CREATED, States.RUNNING_INFERENCE, States.SUCCESS])
    wait_for(job, "head", lambda _, state: seen.append(state), pause=lambda _: None)
    assert seen == ["CREATED", "RUNNING_INFERENCE", "SUCCESS"]
    endless = FakeJob("j", [States.RUNNING_INFERENCE])
    with pytest.raises(HubError, match="has not ended after 6 hours"):
        wait_for(endless, "head", lambda *_: None, pause=lambda _: None)
    failed = FakeJob("j9", [States.CREATED, States.FAILED], "out of memory")
    with pytest.raises(HubError, match=r"job j9 of head failed: out of memory"):
        wait_for(failed, "head", lambda *_: None, pause=lambda _: None)


def test_devices_are_found_by_name_and_checked_against_the_chip() -> None:
    hub = FakeHub()
    assert find_device(hub, "Snapdragon 8 Elite Gen 5 QRD", SM8850).name.endswith("QRD")
    with pytest.raises(HubError, match="SoC model 69, sm8850 is model 87"):
        find_device(hub, "Samsung Galaxy S25", SM8850)
    with pytest.raises(HubError, match="does not offer") as refused:
        find_device(hub, "Samsung Galaxy S99", SM8850)
    assert "Samsung Galaxy S26 Ultra" in refused.value.hint
    with pytest.raises(HubError, match="SoC model 0"):
        find_device(hub, "Google Pixel 10", SM8850)


def test_the_real_client_takes_every_call_that_is_made(tmp_path: Path) -> None:
    """By its documented signatures; no network is needed."""
    hub, model, spec, feeds = mlp_on_a_phone(tmp_path)
    device = find_device(hub, "Samsung Galaxy S26 Ultra", SM8850)
    pair = compiled_pair(tmp_path, model)
    profile_graph(hub, device, pair, model, spec, feeds, ParityLimits(), lambda *_: None)
    (tmp_path / "out").mkdir()
    compile_graph(hub, device, model, spec, SM8850, "2.50", tmp_path / "out", lambda *_: None)
    find_device_list = [call for call in hub.calls if call[0] == "get_devices"]
    assert find_device_list and {call[0] for call in hub.calls} == {
        "get_devices", "submit_inference_job", "submit_compile_job",
    }  # fmt: skip
    for method, args, named in hub.calls:
        bound = inspect.signature(getattr(qai_hub.Client, method)).bind(None, *args, **named)
        assert set(named) <= set(bound.arguments)
    for kind, names in (
        (Job, ("get_status", "url")),
        (InferenceJob, ("download_output_data", "download_profile")),
        (CompileJob, ("download_target_model",)),
        (qai_hub.Client, ("set_verbose",)),
        (JobStatus, ("code",)),
    ):
        assert all(hasattr(kind, name) for name in names), kind
    inspect.signature(CompileJob.download_target_model).bind(None, "file")
    inspect.signature(qai_hub.Client.set_verbose).bind(None, False)
    inspect.signature(InferenceJob.download_output_data).bind(None)
    inspect.signature(InferenceJob.download_profile).bind(None)
    supported = {dtype.name for dtype in qai_hub.Client._SUPPORTED_NUMPY_DTYPES}
    assert {tensor.dtype for tensor in spec.inputs} <= supported and {"uint8", "uint16", "int32"} <= supported


def compiled_pair(folder: Path, model: Path) -> Path:
    (folder / "pair").mkdir()
    return compile_context(model, folder / "pair", "mlp", SM8850, folder / "log").context_model


def mlp_on_a_phone(folder: Path):
    """A hub whose phone computes the MLP exactly, the graph, and two feeds."""
    import onnx

    model = two_layer_mlp().save(folder / "mlp.onnx")
    spec = read_io_spec(onnx.load(model), "mlp")
    generator = np.random.default_rng(2)
    feeds = [{"x": generator.integers(0, 65536, (4, 32)).astype(np.uint16)} for _ in range(2)]

    def compute(pair, inputs):
        session = ReferenceSession(model)
        results = [session.run({"x": x}) for x in inputs["x"]]
        return {name: [result[name] for result in results] for name in results[0]}

    (folder / "hub").mkdir()
    return FakeHub(compute, folder=folder / "hub"), model, spec, feeds


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
