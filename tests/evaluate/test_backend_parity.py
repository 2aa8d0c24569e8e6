"""Saved feeds through every back end, with sessions whose outputs are written down."""

from dataclasses import replace

import numpy as np
import pytest

from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH
from hyco_export.core.golden import write_samples
from hyco_export.device.backends import Backend
from hyco_export.errors import ArtifactError
from hyco_export.evaluate import backend_parity
from hyco_export.evaluate.backend_parity import compare_backends, compare_ids, compare_logits
from tests.evaluate.synthetic_run import ARTIFACTS, LOGITS


class FakeSession:
    open_count = 0

    def __init__(self, run):
        self.run = run
        FakeSession.open_count += 1

    def close(self):
        FakeSession.open_count -= 1


def head_session(wrong):
    def run(feed):
        chain = feed["e"][:4].astype(np.int32)
        return {"chain": chain + (feed["e"][0] in wrong) * np.array([0, 0, 0, 1]), "runner_up": np.array([1, 2])}

    return FakeSession(run)


def slm_session(shift):
    def run(feed):
        levels = feed["embeds"].astype(np.int64)
        return {"logits": (levels + shift * (np.arange(60) == 7)).astype(np.uint16)}

    return FakeSession(run)


def backend(name, wrong=(), shift=0):
    return Backend(
        name, "", lambda run, target: head_session(wrong), lambda run, target: (slm_session(shift), slm_session(0))
    )


@pytest.fixture
def artifacts(tmp_path, monkeypatch):
    generator = np.random.default_rng(5)
    for stage in ("convert-head", "convert-slm"):
        (tmp_path / stage).mkdir()
    heads = [{"e": np.arange(index, index + 6, dtype=np.uint8)} for index in range(10)]
    write_samples(tmp_path / "convert-head" / "head_samples.safetensors", {HEAD_GRAPH: heads})
    trees = [{"embeds": generator.integers(1000, 2000, (3, 60), dtype=np.uint16)} for _ in range(8)]
    write_samples(tmp_path / "convert-slm" / "slm_samples.safetensors", {SLM_TREE_GRAPH: trees})
    backends = {
        b.name: b for b in (backend("torch"), backend("onnx-cpu", wrong={3, 9}), backend("qnn", wrong={3}, shift=5000))
    }
    monkeypatch.setattr(backend_parity, "BACKENDS", backends)
    monkeypatch.setattr(backend_parity, "EMULATOR_FEEDS", 5)
    return replace(ARTIFACTS, root=tmp_path)


def test_every_pair_is_compared_on_the_feeds_that_both_ran(artifacts):
    rows = {
        (row.graph, row.reference, row.candidate): row for row in compare_backends(artifacts, "sm8850", lambda *_: None)
    }
    assert len(rows) == 6
    assert rows[HEAD_GRAPH, "torch", "onnx-cpu"].positions == 10 * 6
    assert rows[HEAD_GRAPH, "torch", "qnn"].positions == 5 * 6
    assert rows[SLM_TREE_GRAPH, "torch", "onnx-cpu"].positions == 8 * 3
    assert rows[SLM_TREE_GRAPH, "onnx-cpu", "qnn"].positions == 5 * 3


def test_differing_ids_lower_the_agreement_of_their_step(artifacts):
    rows = {
        (row.graph, row.reference, row.candidate): row for row in compare_backends(artifacts, "sm8850", lambda *_: None)
    }
    assert rows[HEAD_GRAPH, "torch", "onnx-cpu"].agreement_by_depth == (1.0, 1.0, 1.0, 0.8, 1.0, 1.0)
    assert rows[HEAD_GRAPH, "torch", "qnn"].agreement_by_depth == (1.0, 1.0, 1.0, 0.8, 1.0, 1.0)
    assert rows[HEAD_GRAPH, "onnx-cpu", "qnn"].agreement == 1.0  # both are wrong on the same feed


def test_logits_are_compared_in_real_units(artifacts):
    rows = {
        (row.graph, row.reference, row.candidate): row for row in compare_backends(artifacts, "sm8850", lambda *_: None)
    }
    exact, moved = rows[SLM_TREE_GRAPH, "torch", "onnx-cpu"], rows[SLM_TREE_GRAPH, "torch", "qnn"]
    assert (exact.agreement, exact.range_share) == (1.0, 0.0)
    assert moved.agreement < 0.2  # column 7 wins nearly every row
    assert moved.range_share == pytest.approx(5000 * LOGITS.encoding.scale / 10, rel=0.05)


def test_every_session_is_closed(artifacts):
    compare_backends(artifacts, "sm8850", lambda *_: None)
    assert FakeSession.open_count == 0


def test_progress_counts_back_ends(artifacts):
    seen = []
    compare_backends(artifacts, "sm8850", lambda *step: seen.append(step))
    assert [step[1:] for step in seen] == [(1, 3), (2, 3), (3, 3)]


def test_missing_feeds_name_the_stage(artifacts):
    path = artifacts.root / "convert-slm" / "slm_samples.safetensors"
    write_samples(path, {"slm_prefill": [{"embeds": np.zeros(2)}]})
    with pytest.raises(ArtifactError, match=r"holds no feeds of slm_tree .*hyco-export convert-slm"):
        compare_backends(artifacts, "sm8850", lambda *_: None)


# Comparison of ids and logits.


def test_ids_are_compared_position_by_position():
    wanted = [np.array([1, 2, 3]), np.array([4, 5, 6])]
    found = [np.array([1, 2, 3]), np.array([4, 9, 6])]
    result = compare_ids("head", "torch", "onnx-cpu", wanted, found)
    assert (result.positions, result.agreement) == (6, pytest.approx(5 / 6))
    assert result.agreement_by_depth == (1.0, 0.5, 1.0)


def test_logits_are_compared_row_by_row():
    wanted = [np.array([[0.0, 4.0], [3.0, 1.0]]), np.array([[1.0, 2.0]])]
    found = [np.array([[0.0, 4.0], [3.0, 1.0]]), np.array([[2.0, 1.9]])]
    result = compare_logits("slm_tree", "torch", "qnn", wanted, found)
    assert (result.positions, result.agreement) == (3, pytest.approx(2 / 3))
    assert result.range_share == pytest.approx(1.0 / 4.0)
    assert result.kl_nats > 0


def test_equal_logits_are_perfect():
    rows = [np.array([[0.0, 4.0]])]
    result = compare_logits("slm_tree", "torch", "qnn", rows, rows)
    assert (result.agreement, result.kl_nats, result.range_share) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("compare", [compare_ids, compare_logits])
def test_comparing_nothing_is_refused(compare):
    with pytest.raises(ValueError, match="no feeds to compare head on"):
        compare("head", "torch", "qnn", [], [])
