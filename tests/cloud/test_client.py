"""AI Hub's failures in one line each with the next step, without secrets; and the real client takes our calls."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import qai_hub
from qai_hub.client import CompileJob, InferenceJob, InternalError, Job, JobStatus, UserError

from hyco_export.cloud import client as module
from hyco_export.cloud.client import HubError, aihub_login, harmless, hub_errors, job_failure, open_client
from hyco_export.cloud.compiling import compile_graph
from hyco_export.cloud.jobs import find_device
from hyco_export.cloud.profile import profile_graph
from hyco_export.core.targets import TARGETS
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.parity import ParityLimits, ReferenceSession
from hyco_export.graph.qnn import compile_context
from tests.support import fake_hub
from tests.support.fake_hub import PHONES, TOKEN, FakeHub
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
