"""The device's host code feeds head and SLM what it should, at every edge of ring and span; planted faults show."""

import msgspec
import pytest

from hyco_export.core.network import host
from hyco_export.core.tables import TABLES_FILE, HostTables
from hyco_export.device import head as device_head
from hyco_export.device import slm as device_slm
from hyco_export.evaluate.connect import open_artifacts
from hyco_export.evaluate.diagnosis.finding import Finding
from tests.evaluate.diagnosis.small_run import SmallRun
from tests.support.host_code import head_host_findings, slm_host_findings


def in_host(run: SmallRun) -> list[Finding]:
    artifacts = open_artifacts(run.root, run.recipe.target)
    tables = HostTables(run.root / "convert-slm" / TABLES_FILE)
    return [*head_host_findings(artifacts.head, artifacts.keepset.ids), *slm_host_findings(artifacts.slm, tables)]


def require(findings: list[Finding], fault: str, where: str, seen: str) -> None:
    """All findings have the one name; one of them is at the place, with the figures."""
    assert {finding.fault for finding in findings} == {fault}, findings
    assert any(where in finding.where and seen in finding.seen for finding in findings), findings


def test_the_device_feeds_both_graphs_what_it_should(small_run: SmallRun) -> None:
    assert in_host(small_run) == []


def test_a_device_that_maps_rows_to_other_ids(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = device_head.GraphHead.draft

    def rolled(self: device_head.GraphHead, *arguments: object):
        drafted = draft(self, *arguments)  # type: ignore[arg-type]
        return msgspec.structs.replace(drafted, chain=tuple(token + 1 for token in drafted.chain))

    monkeypatch.setattr(device_head.GraphHead, "draft", rolled)
    require(in_host(small_run), "keep set", "the device's host code", "become ids")


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("module", [device_head, host])
def test_a_ring_that_writes_one_slot_off(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch, module, shift: int
) -> None:
    slots = module.slots
    monkeypatch.setattr(module, "slots", lambda first, count, size: (slots(first, count, size) + shift) % size)
    name = "head" if module is device_head else "SLM"
    require(in_host(small_run), "K/V rows", f"the device's host code of the {name}", "rows that nobody sent")


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["head", "SLM"])
def test_a_host_whose_masks_are_off_by_one(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch, name: str, change: int
) -> None:
    visible = host.visible
    monkeypatch.setattr(host, "visible", lambda q, k, span: visible(q, k, None if span is None else span + change))
    require(in_host(small_run), "sliding window", f"the device's host code of the {name}", "it must see")


def test_a_device_whose_log_probabilities_are_scaled(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_slm.log_softmax_rows
    monkeypatch.setattr(device_slm, "log_softmax_rows", lambda levels, scale: right(levels, 0.9 * scale))
    require(in_host(small_run), "scale", "the device's host code of the SLM", "log q are up to")
