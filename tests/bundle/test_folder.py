"""Building bundles: whole or not at all, nothing foreign replaced, equal inputs giving equal files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hyco_export.bundle import folder
from hyco_export.bundle.document import cases_of
from hyco_export.bundle.folder import build_bundle, chat_parts
from hyco_export.bundle.spec import EMULATOR, GRAPHS, INTEGER, load_arrays, open_bundle, read_bundle
from hyco_export.core.artifact import HEAD, file_digest
from hyco_export.core.device_spec import HEAD_SPEC_FILE, HeadSpec, read_spec
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import Subject
from hyco_export.graph.context_binary import read_context
from tests.evaluate.diagnosis.small_run import SmallRun

INTERRUPTED_RUN = 5


def silent(label: str, done: int, total: int) -> None:
    pass


def test_every_graph_lies_alone_under_its_own_name(bundle_folder: Path) -> None:
    for name in GRAPHS:
        assert sorted(path.name for path in (bundle_folder / name).iterdir()) == [f"{name}.bin", f"{name}.onnx"]
        (graph,) = read_context(bundle_folder / name / f"{name}.bin").graphs
        assert graph.spec.name == name


def test_bundle_json_lists_every_file_and_the_specs(bundle_folder: Path, small_run: SmallRun) -> None:
    bundle = open_bundle(bundle_folder)
    files = {path.relative_to(bundle_folder).as_posix() for path in bundle_folder.rglob("*") if path.is_file()}
    assert files == {*bundle.files, "bundle.json"}
    head = read_spec(small_run.root / HEAD / HEAD_SPEC_FILE, HeadSpec)
    assert bundle.head_spec == head
    assert msgspec.structs.asdict(bundle.slm_spec)["rings"] == {"sliding": 8, "full": 12}
    assert bundle.tolerance.range_share == small_run.recipe.compile.output_range_share


def test_golden_vectors_cover_what_they_should(bundle_folder: Path) -> None:
    bundle = open_bundle(bundle_folder)
    assert all({INTEGER, EMULATOR} == set(case.outputs) for case in bundle.cases)
    passes = [case for case in bundle.cases if case.rows is not None]
    rows = bundle.slm_spec.rows
    assert any(case.rows < rows for case in passes if case.rows is not None), "none is padded"
    rings = (bundle.head_spec.handoff.window, *bundle.slm_spec.rings.values())
    lengths = {}
    for session in bundle.sessions:
        tree = [exchange for exchange in session.exchanges if "/rounds/" in exchange.path]
        requests = [msgspec.msgpack.decode((bundle_folder / one.request).read_bytes()) for one in tree]
        lengths[session.id] = [request[1] for request in requests]
        replies = [msgspec.msgpack.decode((bundle_folder / one.reply).read_bytes()) for one in tree]
        siblings = [reply[2] for reply, request in zip(replies, requests, strict=True) if reply[2] and reply[2][0] > 0]
        assert siblings, "no verdict leaves the chain at the root"
    assert lengths["before"][0] <= min(rings)
    assert lengths["across"][0] <= max(rings) < lengths["across"][-1]
    assert lengths["after"][0] > max(rings)


def test_the_lists_of_qnn_net_run_name_files_that_are_there(bundle_folder: Path) -> None:
    bundle = open_bundle(bundle_folder)
    for name, graph in bundle.graphs.items():
        lines = (bundle_folder / "qnn-net-run" / f"{name}.txt").read_text().splitlines()
        assert len(lines) == len(cases_of(bundle, name)) > 0
        for line, case in zip(lines, (case for case in bundle.cases if case.graph == name), strict=True):
            pairs = dict(part.split(":=") for part in line.split(" "))
            assert pairs == case.inputs
        arrays = load_arrays(bundle_folder, pairs, [tensor.spec for tensor in graph.inputs])
        assert set(arrays) == {tensor.name for tensor in graph.inputs}


def test_a_bundle_of_the_same_artifacts_is_kept(bundle_folder: Path, subject: Subject) -> None:
    before = (bundle_folder / "bundle.json").stat().st_mtime_ns
    build_bundle(subject, bundle_folder, silent)
    assert (bundle_folder / "bundle.json").stat().st_mtime_ns == before
    assert [path.name for path in bundle_folder.parent.iterdir()] == [bundle_folder.name]


def test_a_killed_build_goes_on_to_the_same_bytes(
    bundle_folder: Path, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    class Killed:
        """A session of the emulator that is interrupted at its fifth run."""

        def __init__(self, model: Path, target: str) -> None:
            self._session = open_emulator(model, target)

        def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            nonlocal runs
            runs += 1
            if runs == INTERRUPTED_RUN:
                self._session.close()
                raise KeyboardInterrupt
            return self._session.run(feeds)

        def close(self) -> None:
            self._session.close()

    open_emulator = folder._emulated
    monkeypatch.setattr(folder, "_emulated", Killed)
    out = tmp_path / "bundle"
    with pytest.raises(KeyboardInterrupt):
        build_bundle(subject, out, silent)
    assert not out.exists()
    build_bundle(subject, out, silent)
    bundle = read_bundle(out)
    assert bundle == read_bundle(bundle_folder)
    assert runs == len(bundle.cases) + 1, "what the first try had run was run again"
    build_bundle(subject, out, silent)
    assert runs == len(bundle.cases) + 1, "a whole bundle is kept"
    (out / "BUNDLE.md").write_text("altered")
    (out / "outputs.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"outputs\.txt is no file of the bundle"):
        build_bundle(subject, out, silent)
    (out / "outputs.txt").unlink()
    build_bundle(subject, out, silent)
    assert open_bundle(out) == bundle, "a damaged one is built again"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_foreign_folders_stay_as_they_are(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is a folder with other contents"):
        build_bundle(subject, tmp_path, silent)
    with pytest.raises(ArtifactError, match="is a file"):
        build_bundle(subject, tmp_path / "notes.txt", silent)
    (tmp_path / "bundle.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a bundle of format 1"):
        build_bundle(subject, tmp_path, silent)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_altered_file_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    (copy / "consumer.py").write_text((copy / "consumer.py").read_text().replace("ROOT", "R00T"))
    with pytest.raises(ArtifactError, match=r"consumer\.py is not the file that was written"):
        open_bundle(copy)
    (copy / "consumer.py").unlink()
    with pytest.raises(ArtifactError, match=r"consumer\.py is missing"):
        open_bundle(copy)


def test_the_page_says_every_tensor_and_no_value_is_left_open(bundle_folder: Path) -> None:
    page, bundle = (bundle_folder / "BUNDLE.md").read_text(), read_bundle(bundle_folder)
    for graph in bundle.graphs.values():
        for tensor in (*graph.inputs, *graph.outputs):
            assert f"| `{tensor.name}` | {tensor.dtype} [{' x '.join(map(str, tensor.shape))}]" in page
    assert "{{" not in page and "{%" not in page and bundle.toolchain.qairt in page
    assert "`tolerance_steps`" in page and json.dumps(bundle.drafting.edge_log_prob)[:8] in page


def test_chat_parts_give_the_templates_own_text(small_run: SmallRun) -> None:
    chat = chat_parts(small_run.tokenizer)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "three"})
    whole = small_run.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.before + "one" + chat.after + "two" + chat.between + "three" + chat.after == whole


def test_the_copied_binary_differs_in_its_names_alone(bundle_folder: Path, small_run: SmallRun) -> None:
    bundle = open_bundle(bundle_folder)
    for name, graph in bundle.graphs.items():
        source = small_run.root / f"compile@{small_run.recipe.target}" / f"{name}_ctx_qnn.bin"
        assert file_digest(source) == graph.compiled_sha256
        old, new = source.read_bytes(), (bundle_folder / graph.binary).read_bytes()
        assert len(old) == len(new) and old.count(graph.compiled_name.encode()) > 0
        assert new.count(graph.compiled_name.encode()) == 0
        changed = sum(a != b for a, b in zip(old, new, strict=True))
        assert changed <= old.count(graph.compiled_name.encode()) * (len(graph.compiled_name) + 16)
