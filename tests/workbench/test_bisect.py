"""A fault put into one weight of a small SLM's graph is found where it begins, by every kind of candidate."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hyco_export.core.device_spec import SlmSpec, to_integers
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.network.weight_files import write_slm
from hyco_export.core.targets import TARGETS
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.models.slm.calibration import tree_samples
from hyco_export.workbench.bisect import Divergence, Subject, compare_values, open_subject
from hyco_export.workbench.divergence_picture import divergence_picture, write_divergence
from hyco_export.workbench.graph_values import recorded_values, values_of, write_inputs, write_probe
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import MASK_VALUE, slm_parts

SM8850 = TARGETS["sm8850"]
FAULTY = "layers.1.mlp.down_proj"  # a weight; the tensor that it makes:
MADE = "layers.1.mlp.down"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a converted SLM alone."""
    parts, root = slm_parts(), tmp_path_factory.mktemp("run")
    folder = root / "convert-slm"
    folder.mkdir()
    onnx.save(parts.tree_model, folder / "slm_tree.onnx")
    onnx.save(parts.prefill_model, folder / "slm_prefill.onnx")
    spec = SlmSpec(ROWS, ROWS, 96, "k", 32, 0, {}, {}, {}, (), MASK_VALUE, parts.tree, parts.prefill)
    write_json(folder / "slm.json", spec)
    write_json(folder / "encodings.json", parts.encodings)
    write_slm(folder / "slm_weights.safetensors", parts.network, parts.weights)
    sequences = [random_ids(40, seed) for seed in (7, 8)]
    feeds = tree_samples(parts.float_slm, parts.tables, sequences, ROWS, MASK_VALUE, 3, None)
    trees = [to_integers(parts.tree.inputs, feed) for feed in feeds]
    prefills = [{tensor.name: feed[tensor.name] for tensor in parts.prefill.inputs} for feed in trees]
    write_samples(folder / "slm_samples.safetensors", {"slm_tree": trees, "slm_prefill": prefills})
    return root


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


def test_the_emulator_and_a_phones_files_are_candidates(run: Path, tmp_path: Path) -> None:
    broken = with_fault(run, tmp_path / "broken")
    subject = open_subject(broken, "slm_tree", 1, "layers.*.mlp.*")
    assert all(".mlp." in tensor.name for tensor in subject.inner)
    found = parted(subject, "qnn", tmp_path / "log")
    assert found.first == MADE
    # what a phone gives of the plain graph: its outputs alone
    with_outputs = ReferenceSession(broken / "convert-slm" / "slm_tree.onnx").run(subject.feeds[0])
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "0.npz", allow_pickle=False, **with_outputs)
    (tmp_path / "raw" / "Result_0").mkdir(parents=True)
    for name, values in with_outputs.items():
        values.tofile(tmp_path / "raw" / "Result_0" / f"{name.replace('.', '_')}.raw")
    divergences = [parted(subject, str(tmp_path / kind), tmp_path / "log") for kind in ("npz", "raw")]
    assert divergences[0].tensors == divergences[1].tensors
    assert {one.name for one in divergences[0].tensors} == set(with_outputs)
    assert set(divergences[0].not_compared) == {tensor.name for tensor in subject.inner}
    right = open_subject(run, "slm_tree", 1, "nothing")
    wanted = values_of(right, "onnx-cpu", SM8850, tmp_path / "log")
    found = compare_values(right, ("onnx-cpu", "phone"), wanted, recorded_values(right, tmp_path / "npz"))
    equal = {one.name: one.equal_share for one in found.tensors}
    assert equal["k_new.0"] == equal["v_new.0"] == 1.0 > equal["logits"]  # the fault lies between them


def test_a_probe_gives_out_all_tensors(run: Path, tmp_path: Path) -> None:
    subject = open_subject(run, "slm_tree", 1, "layers.0.mlp.*")
    pair = write_probe(subject, tmp_path / "probe", SM8850, tmp_path / "log")
    write_inputs(subject, tmp_path / "probe")
    assert {path.suffix for path in pair.parent.iterdir()} >= {".onnx", ".bin", ".txt"}
    line = (tmp_path / "probe" / "input_list.txt").read_text().split()
    assert len(line) == len(subject.spec.inputs)
    name, place = line[0].split(":=")
    stored = np.fromfile(tmp_path / "probe" / place, subject.spec.input(name).dtype)
    np.testing.assert_array_equal(stored, subject.feeds[0][name].ravel())
    outputs = {value.name for value in onnx.load(pair).graph.output}
    assert outputs == {tensor.name for tensor in subject.tensors}


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


def test_the_picture_marks_the_place(run: Path, tmp_path: Path) -> None:
    broken = with_fault(run, tmp_path / "broken")
    found = parted(open_subject(broken, "slm_tree", 1), "onnx-cpu", tmp_path / "log")
    picture = divergence_picture(found)
    assert f"{MADE}: " in picture and "SQNR, dB" in picture and picture == divergence_picture(found)
    write_divergence(tmp_path / "p.svg", found)
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Divergence) == found
