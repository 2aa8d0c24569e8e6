"""A server put together from checkpoint folders and a run folder, driven through the engine without HTTP."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import save_file

from hyco_export.core.artifact import Manifest, publish
from hyco_export.core.device_spec import GraphSpec, HeadSpec
from hyco_export.core.encodings import encoding_from_range
from hyco_export.core.handoff import HandoffSpec
from hyco_export.core.keepset import KEEPSET_FILE, KeepSet
from hyco_export.core.recipe import Checkpoint, Models, Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import ArtifactError, CheckpointError, ProtocolError, ServerError
from hyco_export.models.checkpoints import checkpoint_digest
from hyco_export.models.verifier import kv_shapes
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import RULES
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Batching, ServeOptions
from hyco_export.server.assembly import clock_for, open_server_engine
from hyco_export.server.engine import Engine
from hyco_export.server.interfaces import ProcessCpuClock, ThreadCpuClock
from tests.support import gemma

WINDOW = 16
KEEPSET = KeepSet(np.arange(0, gemma.VOCAB, 3), gemma.VOCAB)
GREEDY = wire.Sampling(0.0, 0, 1.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    gemma.tiny_verifier().save_pretrained(folder / "verifier")
    (folder / "verifier" / "tokenizer.json").write_text("{}")  # only its digest is read
    gemma.tiny_head().save_pretrained(folder / "head")
    return folder


@pytest.fixture(scope="module")
def recipe(checkpoints: Path) -> Recipe:
    verifier = Checkpoint(model=str(checkpoints / "verifier"), dtype="float32")
    head = Checkpoint(model=str(checkpoints / "head"), dtype="float32")
    models = Models(verifier=verifier, head=head, slm=verifier)
    return msgspec.structs.replace(load_recipe(embedded_recipe()), models=models)


def publish_head(run: Path, verifier_digest: str, keepset_digest: str = "of the keep set") -> HeadSpec:
    """A `convert-head` artifact without a graph."""
    model = gemma.tiny_verifier()
    names = ("e", "h", "k.sliding", "v.sliding", "k.full", "v.full")
    handoff = HandoffSpec(
        gemma.HIDDEN,
        WINDOW,
        "post",
        kv_shapes(model.config),
        {name: encoding_from_range(-6, 6, "uint8") for name in names},
    )
    spec = HeadSpec(
        steps=4,
        runner_up_steps=2,
        vocab_size=gemma.VOCAB,
        keepset_digest=keepset_digest,
        verifier_digest=verifier_digest,
        handoff=handoff,
        spans={"sliding": None, "full": None},
        inv_freq={},
        mask_value=-100.0,
        graph=GraphSpec("head", (), ()),
    )
    build = run / ".build"
    build.mkdir(parents=True)
    (build / "head.json").write_bytes(msgspec.json.encode(spec))
    publish(build, run / "convert-head", Manifest("convert-head", 1, "key-of-the-head", None, {}, {}, {}, {}, {}, 0.0))
    return spec


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    publish_head(folder, checkpoint_digest(checkpoints / "verifier"))
    return folder


@pytest.fixture(scope="module")
def served(recipe: Recipe, run: Path) -> tuple[Engine, wire.ServerInfo]:
    return open_server_engine(recipe, run)


def request(prompt: list[int], **changes: object) -> wire.PrimeRequest:
    plain = wire.PrimeRequest(wire.PROTOCOL_VERSION, prompt, GREEDY, wire.EXACT, 1, 40, "device", 0, "")
    return msgspec.structs.replace(plain, **changes)


def texts(engine: Engine, primed: wire.PrimeRequest, drafts: Iterator[tuple[list[int], list[int]]]) -> list[int]:
    """All new ids of a generation whose trees come from `drafts`."""
    reply = engine.prime(primed)
    ids = [*primed.prompt, reply.root]
    number, finished = 0, reply.finished
    while not finished:
        number += 1
        tokens, parents = next(drafts)
        body = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(ids), wire.committed_digest(ids), tokens, parents)
        answer = engine.verify(reply.session, number, body)
        ids += answer.tokens
        finished = answer.finished
    engine.close(reply.session)
    return ids[len(primed.prompt) :]


def no_trees() -> Iterator[tuple[list[int], list[int]]]:
    while True:
        yield [], []


def random_trees(seed: int, likely: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    generator = np.random.default_rng(seed)
    while True:
        edges = {(int(generator.integers(ROOT, max(1, row))), int(generator.choice(likely))) for row in range(9)}
        ordered = sorted(edges)
        rows = [parent for parent, _ in ordered]
        yield [token for _, token in ordered], [min(parent, row - 1) for row, parent in enumerate(rows)]


def plain_generate(prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy decoding."""
    with torch.inference_mode():
        output = gemma.tiny_verifier().generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=gemma.STOP_IDS, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


def test_info_says_what_the_server_is(served: tuple[Engine, wire.ServerInfo], checkpoints: Path) -> None:
    _, info = served
    assert info.verifier_digest == checkpoint_digest(checkpoints / "verifier") and len(info.tokenizer_digest) == 64
    assert (info.vocab_size, info.stop_ids) == (gemma.VOCAB, gemma.STOP_IDS)
    assert (info.head_digest, info.keepset_digest) == ("key-of-the-head", "of the keep set")
    assert (info.server_steps, info.prompt_limit, info.node_limit) == (4, gemma.CONTEXT - 1, 64)
    assert info.context_limit == gemma.CONTEXT
    assert info.rules == list(RULES) and info.clock in ("thread-cpu", "process-cpu")


def test_a_server_measures_its_passes_where_it_is_asked_to(
    recipe: Recipe, served: tuple[Engine, wire.ServerInfo]
) -> None:
    assert served[1].rows_ms == []
    engine, info = open_server_engine(recipe, options=ServeOptions(row_times=True))
    assert [rows for rows, _ in info.rows_ms] == [1, 5, 9, 17, 33, 65]
    assert all(0 < ms < 10_000 for _, ms in info.rows_ms)
    assert (engine.session_count, engine.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("length", [1, gemma.WINDOW, 30])
def test_greedy_text_equals_transformers_whoever_drafts(served: tuple[Engine, wire.ServerInfo], length: int) -> None:
    engine, _ = served
    prompt = np.random.default_rng(length).integers(4, gemma.VOCAB, length).tolist()
    expected = plain_generate(prompt, 40)
    assert texts(engine, request(prompt), no_trees()) == expected
    assert texts(engine, request(prompt), random_trees(length, expected)) == expected
    cloud = request(prompt, draft_side="server", draft_steps=4)
    assert texts(engine, cloud, no_trees()) == expected
    assert engine.session_count == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [2, 8])
def test_texts_are_the_same_alone_and_among_others_in_every_pass(
    recipe: Recipe, run: Path, temperature: float, batch: int
) -> None:
    # prompts longer than a pass over prompts, trees from the device and chains of the server, all at once
    options = ServeOptions(batching=Batching(batch, wait_ms=20.0, prefill_rows=16))
    engine, _ = open_server_engine(recipe, run, options=options)
    wanted = []
    for seed in range(10):
        prompt = np.random.default_rng(seed).integers(4, gemma.VOCAB, 3 + 7 * seed).tolist()
        side: dict[str, object] = {"draft_side": "server", "draft_steps": 4} if seed % 3 == 0 else {}
        sampling = wire.Sampling(temperature, 12, 0.95)
        wanted.append(request(prompt, sampling=sampling, seed=seed, max_new_tokens=24, **side))

    def text(primed: wire.PrimeRequest) -> list[int]:
        on_server = primed.draft_side == "server"
        trees = no_trees() if on_server else random_trees(primed.seed, list(range(4, gemma.VOCAB)))
        return texts(engine, primed, trees)

    alone = [text(primed) for primed in wanted]
    assert len({tuple(ids) for ids in alone}) >= 7 and max(map(len, alone)) == 24
    sizes: list[int] = []
    forward = engine._models.forward
    engine._models.forward = lambda parts: (sizes.append(len(parts)), forward(parts))[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(text, wanted))
    assert together == alone
    assert min(batch, 4) <= max(sizes) <= batch and engine.reserved_bytes == 0


def test_the_cache_is_limited_and_the_context_can_be_stretched(recipe: Recipe) -> None:
    options = ServeOptions(cache_bytes=2_000_000, context_limit=40_000)
    engine, info = open_server_engine(recipe, options=options)
    assert info.prompt_limit == 32_768
    one = engine._models.cache_bytes(100)
    with pytest.raises(ProtocolError) as caught:
        engine.prime(request([5] * 20_000))
    assert caught.value.code == "cache_size" and "this server has 2.0 MB" in caught.value.message
    engine.prime(request([5] * 60))
    assert engine.reserved_bytes == one
    default, _ = open_server_engine(recipe)
    assert 0.05 < (default.limits.cache_bytes or 0) / psutil.virtual_memory().total < 0.6


def test_replicas_share_the_free_memory(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyco_export.server.assembly.free_bytes", lambda _: 1_000_000)
    for servers in (1, 4):
        engine, _ = open_server_engine(recipe, options=ServeOptions(servers=servers))
        assert engine.limits.cache_bytes == 500_000 // servers


def test_a_prompt_beyond_the_configs_context_gives_the_same_as_a_forward_without_cache(recipe: Recipe) -> None:
    engine, _ = open_server_engine(recipe, options=ServeOptions(context_limit=4_000))
    prompt = np.random.default_rng(5).integers(4, gemma.VOCAB, 3_000).tolist()
    reply = engine.prime(request(prompt, max_new_tokens=4))
    with torch.inference_mode():
        model = gemma.tiny_verifier()
        states = model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[:, -1:]
        assert reply.root == int(model.lm_head(states).argmax())
    assert engine.reserved_bytes == engine._models.cache_bytes(3_000 + 4)


def test_handoffs_have_the_artifacts_sizes(served: tuple[Engine, wire.ServerInfo], run: Path) -> None:
    engine, _ = served
    spec = msgspec.json.decode((run / "convert-head" / "head.json").read_bytes(), type=HeadSpec).handoff
    reply = engine.prime(request(list(range(4, 24)), head_digest="key-of-the-head"))
    assert reply.handoff is not None
    assert len(reply.handoff.e) + len(reply.handoff.h) == spec.round_bytes
    assert len(reply.handoff.kv) == WINDOW * spec.row_bytes and reply.handoff.first_position == 20 - WINDOW
    assert reply.server_ms > 0


def test_without_a_head_artifact_the_server_still_drafts_itself(recipe: Recipe, tmp_path: Path) -> None:
    engine, info = open_server_engine(recipe, tmp_path)
    assert (info.head_digest, info.keepset_digest, info.server_steps) == ("", "", 4)
    prompt = [5, 9, 7]
    assert texts(engine, request(prompt, draft_side="server", draft_steps=4), no_trees()) == plain_generate(prompt, 40)


def test_with_a_keep_set_the_servers_head_can_be_restricted_to_it(recipe: Recipe, tmp_path: Path) -> None:
    verifier = checkpoint_digest(Path(recipe.models.verifier.model))
    publish_head(tmp_path, verifier, keepset_digest=publish_keepset(tmp_path))
    engine, info = open_server_engine(recipe, tmp_path)
    assert engine.facts.restricts and info.keepset_digest == KEEPSET.digest
    primed = request([5, 9, 7], draft_side="reply", draft_steps=4, draft_scope="artifact")
    assert set(engine.prime(primed).chain) <= set(KEEPSET.ids.tolist())


def test_a_head_of_another_keep_set_is_named(recipe: Recipe, tmp_path: Path) -> None:
    publish_head(tmp_path, checkpoint_digest(Path(recipe.models.verifier.model)))
    publish_keepset(tmp_path)
    with pytest.raises(ArtifactError, match="convert-head was built with keep set of the keep"):
        open_server_engine(recipe, tmp_path)


def test_a_damaged_keep_set_is_named_before_a_model_is_loaded(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_keepset(tmp_path)
    path = tmp_path / "build-keepset" / KEEPSET_FILE
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # the last id is another one, still in order
    path.write_bytes(bytes(content))
    monkeypatch.setattr("hyco_export.server.assembly.load_verifier", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ArtifactError, match=r"keepset.safetensors is not the file that was built"):
        open_server_engine(recipe, tmp_path)


def publish_keepset(run: Path) -> str:
    """A `build-keepset` artifact without a table; its digest."""
    build = run / ".build"
    build.mkdir(parents=True)
    save_file({"ids": KEEPSET.ids}, build / KEEPSET_FILE, metadata={"vocab_size": str(KEEPSET.vocab_size)})
    manifest = Manifest("build-keepset", 1, "key-of-the-keepset", None, {}, {}, {}, {}, {}, 0.0)
    publish(build, run / "build-keepset", manifest)
    return KEEPSET.digest


def test_a_head_artifact_of_another_verifier_is_named(recipe: Recipe, tmp_path: Path) -> None:
    publish_head(tmp_path, "0123456789abcdef")
    with pytest.raises(ArtifactError, match="convert-head was made for verifier 0123456789ab, the recipe's is"):
        open_server_engine(recipe, tmp_path)


def test_a_damaged_head_artifact_is_named(recipe: Recipe, tmp_path: Path) -> None:
    publish_head(tmp_path, "x")
    (tmp_path / "convert-head" / "head.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"head\.json"):
        open_server_engine(recipe, tmp_path)


def test_a_head_of_another_verifier_is_named(recipe: Recipe, tmp_path: Path) -> None:
    gemma.tiny_head("experts").save_pretrained(tmp_path / "head")
    head = Checkpoint(model=str(tmp_path / "head"), dtype="float32")
    wrong = msgspec.structs.replace(recipe, models=msgspec.structs.replace(recipe.models, head=head))
    with pytest.raises(CheckpointError, match="checkpoints do not belong together"):
        open_server_engine(wrong)


def test_server_time_is_measured_by_the_clock_that_sees_the_work() -> None:
    cpu = torch.device("cpu")
    assert isinstance(clock_for(cpu, threads=1), ThreadCpuClock)
    assert isinstance(clock_for(cpu, threads=2), ProcessCpuClock)


@pytest.mark.parametrize(("name", "message"), [("gpu", "'gpu' is not a torch device"), ("cuda:7", "is not there")])
def test_a_device_that_is_not_there_is_named(recipe: Recipe, name: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        open_server_engine(recipe, device=name)
