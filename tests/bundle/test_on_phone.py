"""A bundle on a phone of AI Hub, by a fake of the service."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from hyco_export.bundle.compare import compare
from hyco_export.bundle.on_phone import PhoneRun, run_on_phone
from hyco_export.bundle.spec import GRAPHS, read_bundle
from hyco_export.cli import cloud
from hyco_export.cloud.client import HubError
from hyco_export.core.device_profile import PROFILE_FILE, read_profile, read_profile_file
from hyco_export.errors import ArtifactError
from hyco_export.graph.parity import ReferenceSession
from tests.evaluate.diagnosis.small_run import SmallRun
from tests.support.fake_hub import PHONES, TOKEN, FakeHub, FakeJob

PHONE = PHONES[0].name


def phone(bundle: Path, flip: int = 0, **options) -> FakeHub:
    """Computes as the integer graphs do; `flip` is a bit of the logits that it computes otherwise."""

    def compute(pair: Path, inputs: Mapping[str, Sequence[np.ndarray]]) -> dict[str, list[np.ndarray]]:
        session = ReferenceSession(bundle / "integer" / f"{pair.name}.onnx")
        count = len(next(iter(inputs.values())))
        results = [session.run({name: values[n] for name, values in inputs.items()}) for n in range(count)]
        found = {name: [result[name] for result in results] for name in results[0]}
        if flip and "logits" in found:
            found["logits"] = [values ^ np.uint16(flip) for values in found["logits"]]
        return found

    return FakeHub(compute, **options)


def on_phone(hub: FakeHub, bundle: Path, out: Path) -> PhoneRun:
    return run_on_phone(hub, bundle, PHONE, out, lambda *_: None)


@pytest.fixture(scope="module")
def measured(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PhoneRun, Path, FakeHub]:
    out, hub = tmp_path_factory.mktemp("phone") / "out", phone(bundle_folder)
    return on_phone(hub, bundle_folder, out), out, hub


def test_all_golden_inputs_run_there_and_compare_reads_what_came_back(
    measured: tuple[PhoneRun, Path, FakeHub], bundle_folder: Path
) -> None:
    found, out, hub = measured
    bundle = read_bundle(bundle_folder)
    assert found.comparison.passed and compare(bundle_folder, out) == found.comparison
    stored = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert stored == {PROFILE_FILE, *(f"{case.graph}/{case.id}.npz" for case in bundle.cases)}
    submitted = [args for method, args, _ in hub.calls if method == "submit_inference_job"]
    assert [Path(args[0]) for args in submitted] == [bundle_folder / graph for graph in GRAPHS]
    for (_, _, inputs), graph in zip(submitted, GRAPHS, strict=True):
        assert {len(values) for values in inputs.values()} == {sum(case.graph == graph for case in bundle.cases)}


def test_the_profile_is_one_of_the_runs_graphs(
    measured: tuple[PhoneRun, Path, FakeHub], small_run: SmallRun, tmp_path: Path
) -> None:
    found, out, _ = measured
    profile = read_profile_file(out / PROFILE_FILE)
    assert profile == found.profile and profile.device == PHONE
    assert {graph: profile.pass_ms(graph) for graph in GRAPHS} == dict.fromkeys(GRAPHS, 1.5)
    logits = next(one for one in profile.graphs["slm_tree"].outputs if one.name == "logits")
    assert logits.passed and 0.0 < logits.equal_share <= 1.0 and logits.outside_share < 0.1
    (tmp_path / PROFILE_FILE).write_bytes((out / PROFILE_FILE).read_bytes())
    (tmp_path / "compile@sm8850").symlink_to(small_run.root / "compile@sm8850")
    assert read_profile(tmp_path, "sm8850") == profile  # so bench takes it, once it lies in the run folder
    with pytest.raises(ArtifactError, match="has no times of other"):
        profile.pass_ms("other")


def test_a_phone_that_computes_otherwise_is_outside(
    bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = phone(bundle_folder, flip=1 << 14)
    assert cloud.profile_bundle(bundle_folder, None, tmp_path / "out", lambda: hub) == 1
    said = capsys.readouterr().out
    assert "OUTSIDE: logits" in said and "FAIL: " in said and "within the limits" in said
    assert f"compare {bundle_folder} {tmp_path / 'out'}" in said.replace("\n", " ")
    assert cloud.profile_bundle(bundle_folder, None, tmp_path / "out", lambda: phone(bundle_folder)) == 0  # replaced
    assert TOKEN.encode() not in (tmp_path / "out" / PROFILE_FILE).read_bytes()


def test_a_failing_job_and_an_offline_device_leave_nothing_behind(bundle_folder: Path, tmp_path: Path) -> None:
    class SecondFails(FakeHub):
        def submit_inference_job(self, model: str, *args, **named) -> FakeJob:
            self.fails = "out of memory" if Path(model).name == "slm_tree" else None
            return super().submit_inference_job(model, *args, **named)

    failing = SecondFails(phone(bundle_folder).compute)
    offline = phone(bundle_folder, phones=PHONES[1:])
    gone = FakeHub(raises={"submit_inference_job": RuntimeError(f"{PHONE} is not available. token={TOKEN}")})
    for hub, message, hint in (
        (failing, r"AI Hub job jfailed01 of slm_tree failed: out of memory", "see its log"),
        (offline, rf"does not offer '{PHONE}', or it is offline", "Snapdragon 8 Elite Gen 5 QRD"),
        (gone, "submitting hyco head: the device is offline", "--list-devices"),
    ):
        with pytest.raises(HubError, match=message) as refused:
            on_phone(hub, bundle_folder, tmp_path / "out")
        assert hint in (refused.value.hint or "") and "\n" not in str(refused.value) and TOKEN not in str(refused.value)
        assert not list(tmp_path.iterdir())


def test_a_folder_of_other_things_is_not_replaced(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ArtifactError, match="holds something else"):
        on_phone(FakeHub(), bundle_folder, tmp_path)
