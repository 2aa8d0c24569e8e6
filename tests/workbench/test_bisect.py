"""A fault put into one weight of a small SLM's graph is found where it begins, by every kind of candidate."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hyco_export.core.targets import TARGETS
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.workbench.bisect import Divergence, Subject, compare_values, open_subject
from hyco_export.workbench.graph_values import recorded_values, values_of

SM8850 = TARGETS["sm8850"]
FAULTY = "layers.1.mlp.down_proj"  # a weight; the tensor that it makes:
MADE = "layers.1.mlp.down"


def with_fault(run: Path, root: Path) -> Path:
    """The same run with one weight's scales half as large again in the graph."""
    (root / "convert-slm").mkdir(parents=True)
    for path in (run / "convert-slm").iterdir():
        (root / "convert-slm" / path.name).write_bytes(path.read_bytes())
    model = onnx.load(root / "convert-slm" / "slm_tree.onnx")
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == f"{FAULTY}/scale")
    values = numpy_helper.to_array(scale) * np.float32(1.5)
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    onnx.save(model, root / "convert-slm" / "slm_tree.onnx")
    return root


def parted(subject: Subject, candidate: str, log: Path) -> Divergence:
    wanted = values_of(subject, "torch", SM8850, log)
    return compare_values(subject, ("torch", candidate), wanted, values_of(subject, candidate, SM8850, log))


def test_a_right_graph_does_not_part(run: Path, tmp_path: Path) -> None:
    for graph in ("slm_tree", "slm_prefill"):
        found = parted(open_subject(run, graph, 2), "onnx-cpu", tmp_path / "log")
        assert found.first is None and found.feeds == 2 and not found.not_compared
        assert len(found.tensors) > 50
        assert min(one.sqnr_db for one in found.tensors if one.sqnr_db is not None and not one.saturates) > 20


def test_a_fault_is_found_where_it_begins(run: Path, tmp_path: Path) -> None:
    broken = with_fault(run, tmp_path / "broken")
    found = parted(open_subject(broken, "slm_tree", 2), "onnx-cpu", tmp_path / "log")
    assert found.first == MADE and found.steepest == MADE
    names = [one.name for one in found.tensors]
    by_name = {one.name: one for one in found.tensors}
    assert by_name[MADE].sqnr_db == pytest.approx(-20 * np.log10(0.5), abs=0.5)
    assert all((by_name[name].sqnr_db or 99) > 20 for name in by_name[MADE].made_of)
    assert names.index("k_new.0") < names.index(MADE) < names.index("logits")  # the graph's order


def test_what_cannot_be_compared_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(HycoError, match="unknown graph 'tree'"):
        open_subject(run, "tree", 1)
    subject = open_subject(run, "slm_tree", 1)
    with pytest.raises(HycoError, match="neither a back end nor a folder"):
        values_of(subject, "gpu", SM8850, tmp_path / "log")
    (tmp_path / "phone" / "Result_0").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="no outputs of feed 0"):
        recorded_values(subject, tmp_path / "phone")
    (tmp_path / "phone" / "Result_0" / "logits.raw").write_bytes(b"123")
    with pytest.raises(ArtifactError, match="has 3 B"):
        recorded_values(subject, tmp_path / "phone")
    np.savez(tmp_path / "phone" / "0.npz", allow_pickle=False, logits=np.zeros(3, np.uint16))
    with pytest.raises(ArtifactError, match=r"came back as \[3\]"):
        recorded_values(subject, tmp_path / "phone")
