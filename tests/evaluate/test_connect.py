"""Artifacts that do not belong together are refused before anything is driven."""

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.artifact import Manifest, publish
from hyco_export.core.device_spec import GraphSpec, HeadSpec, SlmSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HandoffSpec, KvShape
from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe import Checkpoint, Data, KeepSetChoice, Models, Recipe
from hyco_export.errors import ArtifactError, ServerError
from hyco_export.evaluate.connect import (
    Expected,
    expected_server,
    mismatches,
    open_artifacts,
    require_compatible,
    require_room,
)
from hyco_export.protocol.wire import PROTOCOL_VERSION, ServerInfo

TARGET = "sm8850"
KEEPSET = KeepSet(np.array([0, 3, 5]), 8)
GRAPH = GraphSpec("head", (), ())
KV = {"sliding": KvShape(1, 2), "full": KvShape(1, 2)}
HANDOFF = HandoffSpec(4, 16, "post", KV, {"e": Encoding("uint8", 0.1, 128)})


def head_spec(keepset_digest=KEEPSET.digest):
    return HeadSpec(4, 2, 8, keepset_digest, "v" * 64, HANDOFF, {}, {}, -100.0, GRAPH)


def slm_spec(keepset_digest=KEEPSET.digest):
    return SlmSpec(32, 32, 8, keepset_digest, 4, 0, {}, {}, {}, (), -100.0, GRAPH, GRAPH)


def put(root, stage, folder, inputs, files):
    build = root / f".{folder}"
    build.mkdir(parents=True)
    for name, content in files.items():
        (build / name).write_bytes(content)
    publish(build, root / folder, Manifest(stage, 1, f"key-{stage}", {}, inputs, {}, {}, {}, {}, 0.0))


def keepset_bytes(tmp_path):
    path = tmp_path / "keepset"
    save_file({"ids": KEEPSET.ids}, path, metadata={"vocab_size": "8"})
    return path.read_bytes()


@pytest.fixture
def build_run(tmp_path):
    def build(head=None, slm=None, compile_inputs=None):
        root = tmp_path / "run"
        keep = {"build-keepset": "key-build-keepset"}
        put(root, "build-keepset", "build-keepset", {}, {"keepset.safetensors": keepset_bytes(tmp_path)})
        put(root, "convert-head", "convert-head", keep, {"head.json": msgspec.json.encode(head or head_spec())})
        put(root, "convert-slm", "convert-slm", keep, {"slm.json": msgspec.json.encode(slm or slm_spec())})
        inputs = compile_inputs or {"convert-head": "key-convert-head", "convert-slm": "key-convert-slm"}
        put(root, "compile", f"compile@{TARGET}", inputs, {"head_ctx.onnx": b"x"})
        return root

    return build


def test_a_whole_run_is_read(build_run):
    artifacts = open_artifacts(build_run(), TARGET)
    assert artifacts.head == head_spec()
    assert artifacts.slm == slm_spec()
    assert artifacts.head_key == "key-convert-head"
    assert artifacts.keepset.digest == KEEPSET.digest


def test_what_a_server_must_be_follows_from_artifacts_and_recipe(build_run):
    checkpoint = Checkpoint(model="x")
    recipe = Recipe(
        name="r",
        models=Models(verifier=checkpoint, head=checkpoint, slm=checkpoint),
        data=Data(calibration="a", validation="b", conversations="c"),
        keepset=KeepSetChoice(size=300),
    )
    expected = expected_server(open_artifacts(build_run(), TARGET), "t" * 64, recipe)
    assert (expected.verifier_digest, expected.tokenizer_digest) == ("v" * 64, "t" * 64)
    assert (expected.head_digest, expected.keepset_digest) == ("key-convert-head", KEEPSET.digest)
    assert (expected.vocab_size, expected.node_limit, expected.server_steps) == (8, 32, 4)


@pytest.mark.parametrize("stage", ["build-keepset", "convert-head", "convert-slm", f"compile@{TARGET}"])
def test_a_missing_artifact_names_the_command(build_run, stage):
    root = build_run()
    (root / stage / "manifest.json").unlink()
    with pytest.raises(ArtifactError) as caught:
        open_artifacts(root, TARGET)
    assert stage in caught.value.message
    assert caught.value.hint == f"build it again: hyco-export {stage.split('@')[0]}"


def test_an_altered_file_is_named(build_run):
    root = build_run()
    (root / "convert-head" / "head.json").write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=r"head.json is not the file that was built"):
        open_artifacts(root, TARGET)


def test_a_binary_of_another_head_is_refused(build_run):
    root = build_run(compile_inputs={"convert-head": "older", "convert-slm": "key-convert-slm"})
    with pytest.raises(ArtifactError, match="compile was built from another convert-head"):
        open_artifacts(root, TARGET)


@pytest.mark.parametrize("part", ["head", "slm"])
def test_a_graph_of_another_keep_set_is_refused(build_run, part):
    changed = {"head": head_spec("other"), "slm": slm_spec("other")}[part]
    root = build_run(**{part: changed})
    with pytest.raises(ArtifactError, match=f"convert-{part} was converted for another keep set"):
        open_artifacts(root, TARGET)


def test_a_spec_of_another_shape_is_named(build_run, tmp_path):
    root = build_run(head=slm_spec())
    with pytest.raises(ArtifactError, match=r"head.json is not a HeadSpec"):
        open_artifacts(root, TARGET)


# A server that serves something else is named before the first prompt.


EXPECTED = Expected("v" * 64, "t" * 64, 2048, "k" * 64, "h" * 64, 32, 4, ("exact", "epsilon"))
INFO = ServerInfo(
    version=PROTOCOL_VERSION,
    server="hyco-export",
    verifier_digest="v" * 64,
    tokenizer_digest="t" * 64,
    vocab_size=2048,
    stop_ids=[1],
    head_digest="h" * 64,
    keepset_digest="k" * 64,
    node_limit=64,
    prompt_limit=4096,
    server_steps=4,
    rules=["exact", "epsilon"],
    clock="thread-cpu",
)


def test_the_runs_own_server_fits():
    assert mismatches(INFO, EXPECTED) == []
    require_compatible(INFO, EXPECTED, "http://here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "it speaks protocol version 9, this side 1"),
        ({"verifier_digest": "x" * 64}, "verifier checkpoint is xxxxxxxxxxxx… there, vvvvvvvvvvvv… here"),
        ({"tokenizer_digest": "x" * 64}, "tokenizer is xxxxxxxxxxxx… there"),
        ({"keepset_digest": "x" * 64}, "keep set is xxxxxxxxxxxx… there"),
        ({"head_digest": ""}, "head artifact (its encodings) is none there, hhhhhhhhhhhh… here"),
        ({"vocab_size": 262144}, "its vocabulary has 262,144 tokens, the artifacts' 2,048"),
        ({"node_limit": 8}, "it verifies at most 8 nodes a round, the recipe sends 32"),
        ({"server_steps": 0}, "its own head drafts 0 tokens, the baseline needs 4"),
        ({"rules": ["exact"]}, "it does not know the acceptance rule 'epsilon'"),
    ],
)
def test_each_mismatch_is_named(change, words):
    found = mismatches(msgspec.structs.replace(INFO, **change), EXPECTED)
    assert len(found) == 1
    assert words in found[0]


def test_all_mismatches_are_named_at_once_with_the_next_step():
    info = msgspec.structs.replace(INFO, head_digest="", vocab_size=5)
    with pytest.raises(ServerError) as caught:
        require_compatible(info, EXPECTED, "http://there:1")
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("the server at http://there:1 does not belong to this run: ")
    assert "head artifact" in caught.value.message and "vocabulary" in caught.value.message
    assert "hyco-export serve" in caught.value.hint


def test_prompts_that_the_server_would_refuse_for_their_length_are_not_sent() -> None:
    info = msgspec.structs.replace(INFO, prompt_limit=100, context_limit=120)
    require_room(info, "p", 100, 20)
    with pytest.raises(ServerError, match="prompt p has 101 ids, the server takes 100"):
        require_room(info, "p", 101, 1)
    with pytest.raises(ServerError, match="prompt p and its answer need 121 positions, the server's verifier has 120"):
        require_room(info, "p", 100, 21)
    require_room(msgspec.structs.replace(info, context_limit=0), "p", 100, 10_000)  # an older server does not say
