"""Devices and jobs of AI Hub."""

import pytest

from hyco_export.cloud.client import HubError
from hyco_export.cloud.jobs import find_device, wait_for
from tests.cloud.test_client import SM8850
from tests.support.fake_hub import FakeHub, FakeJob, States


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
