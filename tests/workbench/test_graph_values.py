"""Values of a graph's tensors by the emulator, from a phone's files, and by a probe."""

from pathlib import Path

import numpy as np
import onnx

from hyco_export.graph.parity import ReferenceSession
from hyco_export.workbench.bisect import compare_values, open_subject
from hyco_export.workbench.graph_values import recorded_values, values_of, write_inputs, write_probe
from tests.workbench.test_bisect import MADE, SM8850, parted, with_fault


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
