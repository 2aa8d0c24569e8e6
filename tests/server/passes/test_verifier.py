"""Tree attention, commits, hand-offs and the server's own head against stock transformers forwards.

Legend: L committed positions, N nodes, V vocabulary. Contexts stand on both sides of the sliding window (6).
"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.handoff import HandoffSpec, HiddenNorm, KvRows
from hyco_export.models import fused_layers
from hyco_export.models.verifier import kv_shapes
from hyco_export.protocol.tree import ROOT, path_to
from hyco_export.server.assembly import clock_for
from hyco_export.server.interfaces import Chain, Check, Prefill
from hyco_export.server.passes import cache as slot_cache
from hyco_export.server.passes import verifier
from hyco_export.server.passes.cache import HandoffEncoder, quantize
from hyco_export.server.passes.head_drafter import ChainDrafter
from hyco_export.server.passes.verifier import TorchVerifierSession, Verifier
from tests.support import gemma

TOLERANCE = 1e-3  # K, V, states and logits are of size 1; float32 norms amplify rounding, a wrong mask gives 1e-1
SLOW_MODELS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STRUCTURES = list(gemma.STRUCTURES)
PATHS = pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])


def random_tree(generator: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [N], parents [N]: deep as often as wide, equal tokens under different parents."""
    parents = np.array([int(generator.integers(max(ROOT, row - 4), row)) for row in range(nodes)], np.int64)
    tokens: list[int] = []
    for row in range(nodes):
        taken = {tokens[other] for other in range(row) if parents[other] == parents[row]}
        tokens.append(int(generator.choice([t for t in range(gemma.VOCAB) if t not in taken])))
    return np.array(tokens, np.int64), parents


@torch.inference_mode()
def fresh(model: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Logits [T, V], states [T, H] after the norm and the shared K/V of a forward without any cache."""
    output = model(torch.tensor([ids]), use_cache=False, return_shared_kv_states=True, output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0], output.shared_kv_states


def committed_rows(session: TorchVerifierSession, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    return session.cache.committed(session._verifier.handoff_layers[layer_type])


def assert_equals_fresh_prefill(session: TorchVerifierSession, model: torch.nn.Module, ids: list[int]) -> None:
    """Every cached K/V row of every layer equals that of a fresh prefill of the same ids."""
    other = Verifier(model).open()
    other.prime(np.array(ids))
    assert session.length == other.length == len(ids)
    layers = [layer for group in session.cache.layout.groups for layer in group.layers]
    assert layers
    for layer in layers:
        held = min(session.cache.held(layer), other.cache.held(layer))
        assert held >= min(len(ids), gemma.WINDOW - 1)
        for ours, theirs in zip(session.cache.committed(layer, held), other.cache.committed(layer, held), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    _, states, shared = fresh(model, ids)
    torch.testing.assert_close(session._state, states[-1], atol=TOLERANCE, rtol=0)
    for layer_type, (keys, values) in shared.items():
        ours = committed_rows(session, layer_type.removesuffix("_attention"))
        held = ours[0].shape[1]
        torch.testing.assert_close(ours[0], keys[0, :, -held:], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours[1], values[0, :, -held:], atol=TOLERANCE, rtol=0)


@PATHS
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("length", [1, gemma.WINDOW - 1, gemma.WINDOW, gemma.WINDOW + 1, 23])
def test_every_row_of_a_tree_equals_a_fresh_forward_of_its_path(structure: str, fused: bool, length: int) -> None:
    model = gemma.tiny_verifier(structure)
    generator = np.random.default_rng(length)
    prompt = generator.integers(0, gemma.VOCAB, length)
    tokens, parents = random_tree(generator, 12)
    session = Verifier(model, fused=fused).open()
    np.testing.assert_allclose(session.prime(prompt), fresh(model, prompt.tolist())[0][-1], atol=TOLERANCE)
    root = int(generator.integers(gemma.VOCAB))
    logits = session.verify(root, tokens, parents)
    assert logits.shape == (13, gemma.VOCAB) and logits.dtype == np.float32
    for row in range(-1, len(tokens)):
        path = [int(tokens[node]) for node in path_to(parents.tolist(), row)]
        expected = fresh(model, [*prompt.tolist(), root, *path])[0][-1]
        np.testing.assert_allclose(logits[row + 1], expected, atol=TOLERANCE)


@PATHS
@pytest.mark.parametrize("structure", STRUCTURES)
@SLOW_MODELS
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 16))
def test_the_cache_after_commits_equals_a_fresh_prefill(structure: str, fused: bool, seed: int, length: int) -> None:
    model = gemma.tiny_verifier(structure)
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, gemma.VOCAB, length).tolist()
    session = Verifier(model, fused=fused).open()
    session.prime(np.array(ids))
    for _ in range(4):
        root = int(generator.integers(gemma.VOCAB))
        tokens, parents = random_tree(generator, int(generator.integers(0, 9)))
        session.verify(root, tokens, parents)
        end = int(generator.integers(ROOT, len(tokens)))
        path = path_to(parents.tolist(), end)
        session.commit(path)
        ids += [root, *(int(tokens[row]) for row in path)]
    assert_equals_fresh_prefill(session, model, ids)


def test_models_are_fused_where_their_products_are_plain_matrices() -> None:
    for structure in STRUCTURES:
        model, head = gemma.tiny_verifier(structure), gemma.tiny_head(structure)
        assert Verifier(model)._stack is not None and ChainDrafter(head)._stack is not None
        assert Verifier(model, fused=False)._stack is None and ChainDrafter(head, fused=False)._stack is None
    other = copy.deepcopy(gemma.tiny_verifier())
    layer = other.model.layers[1].self_attn
    layer.o_proj = torch.nn.Linear(layer.o_proj.in_features, layer.o_proj.out_features, bias=True)
    assert Verifier(other)._stack is None


def test_fusing_a_model_leaves_it_as_it_was_and_holds_nothing_twice() -> None:
    model = copy.deepcopy(gemma.tiny_verifier())
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = model(ids).logits
        stack = Verifier(model)._stack
        assert torch.equal(model(ids).logits, before)
    fused = {stack_layer._in.untyped_storage().data_ptr() for stack_layer in stack._layers}
    assert fused == {layer.self_attn.q_proj.weight.untyped_storage().data_ptr() for layer in model.model.layers}
    again = Verifier(model)._stack
    assert [one._in.data_ptr() for one in again._layers] == [one._in.data_ptr() for one in stack._layers]


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_compiled_layers_compute_the_same_and_one_compilation_serves_all_trees(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the compiler's front end without its code generator, which takes minutes and is the compiler's own affair
    functions = fused_layers._project, fused_layers._feed
    compiled = [torch.compile(one, dynamic=True, fullgraph=True, backend="aot_eager") for one in functions]
    monkeypatch.setattr(fused_layers, "_compiled", lambda: compiled)
    model, head = gemma.tiny_verifier(structure), gemma.tiny_head(structure)
    session = Verifier(model, ChainDrafter(head, compiled=True), compiled=True).open()
    eager = Verifier(model, ChainDrafter(head)).open()
    generator = np.random.default_rng(3)
    prompt = generator.integers(0, gemma.VOCAB, 20)
    np.testing.assert_allclose(session.prime(prompt), eager.prime(prompt), atol=TOLERANCE)
    assert session.draft(5, 4) == eager.draft(5, 4)
    graphs = []
    for nodes in (4, 9, 32):
        tokens, parents = random_tree(generator, nodes)
        logits = session.verify(5, tokens, parents)
        np.testing.assert_allclose(logits, eager.verify(5, tokens, parents), atol=TOLERANCE)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[0] == graphs[2]


def test_a_verify_that_is_not_committed_leaves_no_trace() -> None:
    model = gemma.tiny_verifier()
    session = Verifier(model).open()
    session.prime(np.arange(9))
    session.verify(4, np.array([5, 6]), np.array([ROOT, 0]))
    again = session.verify(4, np.array([7]), np.array([ROOT]))
    np.testing.assert_allclose(again[1], fresh(model, [*range(9), 4, 7])[0][-1], atol=TOLERANCE)
    session.commit((0,))
    assert_equals_fresh_prefill(session, model, [*range(9), 4, 7])


@PATHS
@pytest.mark.parametrize("structure", STRUCTURES)
def test_long_generations_in_small_caches_equal_a_fresh_prefill(structure: str, fused: bool) -> None:
    # passes of 8 rows: the sliding layers' kept positions move to the front again and again
    model = gemma.tiny_verifier(structure)
    shared = Verifier(model, prefill_rows=8, node_limit=5, fused=fused)
    generator = np.random.default_rng(3)
    ids = generator.integers(0, gemma.VOCAB, 75).tolist()
    session = shared.open()
    session.reserve(130)
    np.testing.assert_allclose(session.prime(np.array(ids)), fresh(model, ids)[0][-1], atol=TOLERANCE)
    assert_equals_fresh_prefill(session, model, ids)
    while len(ids) < 120:
        root = int(generator.integers(gemma.VOCAB))
        tokens, parents = random_tree(generator, 5)
        session.verify(root, tokens, parents)
        path = path_to(parents.tolist(), int(generator.integers(ROOT, 5)))
        session.commit(path)
        ids += [root, *(int(tokens[row]) for row in path)]
    assert_equals_fresh_prefill(session, model, ids)
    assert session.cache.size_bytes == shared.cache_bytes(130)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("positions", [1, 30, 32_768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_session_takes_the_bytes_that_the_config_says(structure: str, positions: int, dtype: torch.dtype) -> None:
    model = copy.deepcopy(gemma.tiny_verifier(structure)).to(dtype)
    shared = Verifier(model, ChainDrafter(gemma.tiny_head(structure)))
    session = shared.open()
    session.reserve(positions)
    assert session.cache.size_bytes == shared.cache_bytes(positions)
    # by hand, for the K and V of the layers that have some of their own
    text = model.config
    stores = [index for index, mode in enumerate(text.kv_sharing_modes) if mode != "reuse"]
    values = 0
    for index in stores:
        sliding = text.layer_types[index] == "sliding_attention"
        heads_and_dim = 2 * 8 if sliding else 1 * 16
        if text.layer_types[index] == "full_attention" and not text.attention_k_eq_v:
            heads_and_dim = text.per_layer_config[index].num_key_value_heads * 16
        reach = gemma.WINDOW + 1 if index == max(i for i in stores if text.layer_types[i] == "sliding_attention") else 5
        slots = positions + 65 if not sliding else min(positions + 65, reach + verifier.PREFILL_ROWS)
        values += 2 * heads_and_dim * slots
    assert session.cache.size_bytes == values * dtype.itemsize


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_pass_allocates_no_cache(structure: str) -> None:
    shared = Verifier(gemma.tiny_verifier(structure))
    session = shared.open()
    session.reserve(60)
    places = [store.data.data_ptr() for store in session.cache.stores]
    session.prime(np.arange(40))
    for _ in range(10):
        session.verify(1, np.array([2, 3]), np.array([ROOT, 0]))
        session.commit((0,))
    assert [store.data.data_ptr() for store in session.cache.stores] == places


def test_more_than_was_reserved_is_a_fault() -> None:
    shared = Verifier(gemma.tiny_verifier(), prefill_rows=16, node_limit=4)
    session = shared.open()
    session.reserve(20)
    session.prime(np.arange(19))
    session.verify(1, np.array([2, 3, 4, 5]), np.array([ROOT, 0, 1, 2]))
    session.commit((0, 1))
    with pytest.raises(RuntimeError, match=r"22 \+ 5 rows in a cache for 20 positions"):
        session.verify(1, np.array([2, 3, 4, 5]), np.array([ROOT, 0, 1, 2]))
    with pytest.raises(RuntimeError, match="a pass of 17 rows, the cache takes 16"):
        shared.forward([Prefill(shared.open(), np.arange(17))])


def test_sliding_layers_hold_and_read_no_more_than_can_be_seen() -> None:
    layout = slot_cache.cache_layout(gemma.tiny_verifier().config, prefill_rows=40, tree_rows=3)
    cache = slot_cache.SlotCache(layout, 200, torch.float32, torch.device("cpu"))
    rows = torch.zeros(2, 40, 8)
    for _ in range(4):
        cache.make_room(40)
        cache.update(rows, rows, 0)
        cache.keep(range(40))
    cache.make_room(3)
    keys, _ = cache.update(rows[:, :3], rows[:, :3], 0)
    assert keys.shape[1] == gemma.WINDOW - 1 + 3
    assert cache.held(0) == gemma.WINDOW - 1
    with pytest.raises(RuntimeError, match="layer 0 holds 5 positions, not 6"):
        cache.committed(0, 6)


# --- several sessions in one pass


class Beside:
    """A session that is driven alone and beside others, with the same trees."""

    def __init__(self, shared: Verifier, seed: int, length: int) -> None:
        generator = np.random.default_rng(seed)
        self.prompt = generator.integers(0, gemma.VOCAB, length)
        self.trees = [random_tree(generator, int(generator.integers(0, 9))) for _ in range(3)]
        self.roots = generator.integers(0, gemma.VOCAB, 3).tolist()
        self.paths = [
            path_to(parents.tolist(), int(generator.integers(ROOT, len(parents)))) for _, parents in self.trees
        ]
        self.session = shared.open()

    def part(self, number: int) -> Prefill | Check:
        if number == 0:
            return Prefill(self.session, self.prompt)
        tokens, parents = self.trees[number - 1]
        return Check(self.session, self.roots[number - 1], tokens, parents)

    def commit(self, number: int) -> None:
        if number > 0:
            self.session.commit(self.paths[number - 1])

    def ids(self) -> list[int]:
        ids = self.prompt.tolist()
        for root, (tokens, _), path in zip(self.roots, self.trees, self.paths, strict=True):
            ids += [root, *(int(tokens[row]) for row in path)]
        return ids


@PATHS
@pytest.mark.parametrize("structure", STRUCTURES)
@SLOW_MODELS
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5))
def test_a_session_computes_the_same_alone_and_beside_others(
    structure: str, fused: bool, seed: int, lengths: list[int]
) -> None:
    model, head = gemma.tiny_verifier(structure), gemma.tiny_head(structure)
    shared = Verifier(model, ChainDrafter(head, fused=fused), fused=fused)
    alone = [Beside(shared, seed + place, length) for place, length in enumerate(lengths)]
    together = [Beside(shared, seed + place, length) for place, length in enumerate(lengths)]
    # session k starts k passes later: prompts and trees stand in one pass
    for turn in range(4 + len(lengths)):
        active = [(place, turn - place) for place in range(len(lengths)) if 0 <= turn - place < 4]
        if not active:
            continue
        results = shared.forward([together[place].part(number) for place, number in active])
        for (place, number), logits in zip(active, results, strict=True):
            (expected,) = shared.forward([alone[place].part(number)])
            np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=TOLERANCE)
            alone[place].commit(number)
            together[place].commit(number)
    chains = [[Chain(one.session, 7, 1 + place % 4) for place, one in enumerate(group)] for group in (alone, together)]
    assert shared.draft(chains[1]) == [shared.draft([chain])[0] for chain in chains[0]]
    for one in together:
        assert_equals_fresh_prefill(one.session, model, one.ids())


def test_sessions_do_not_see_each_other() -> None:
    model = gemma.tiny_verifier()
    shared = Verifier(model)
    prompts = [np.arange(7), np.arange(20, 33)]
    alone = []
    for prompt in prompts:
        session = shared.open()
        session.prime(prompt)
        alone.append(session.verify(3, np.array([4]), np.array([ROOT])))
        session.close()
    together = [shared.open() for _ in prompts]
    for session, prompt in zip(together, prompts, strict=True):
        session.prime(prompt)
    for session, expected in zip(together, alone, strict=True):
        assert np.array_equal(session.verify(3, np.array([4]), np.array([ROOT])), expected)


def test_closing_frees_the_cache() -> None:
    session = Verifier(gemma.tiny_verifier()).open()
    session.prime(np.arange(9))
    session.close()
    assert session.length == 0 and session._cache is None


# --- the server's own head


def transformers_chain(model, head, ids: list[int], steps: int, kept: np.ndarray | None = None) -> list[int]:
    """What assisted generation drafts for the root ids[-1] when it is given K/V of exactly the positions before it.

    kept: the only ids it may draft.
    """
    choice = torch.arange(gemma.VOCAB) if kept is None else torch.from_numpy(kept)
    _, states, shared = fresh(model, ids[:-1])
    hidden = states[None, -1:]
    position = torch.tensor([[len(ids) - 1]])
    token = torch.tensor([[ids[-1]]])
    drafted = []
    for _ in range(steps):
        inputs = torch.cat([model.get_input_embeddings()(token), hidden], dim=-1)
        with torch.inference_mode():
            output = head(inputs_embeds=inputs, position_ids=position, shared_kv_states=dict(shared), use_cache=False)
        token, hidden = choice[output.logits[..., choice].argmax(-1)], output.last_hidden_state
        drafted.append(int(token))
    return drafted


@PATHS
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("length", [1, gemma.WINDOW, gemma.WINDOW + 1, gemma.WINDOW + 2, 30])
def test_the_servers_chain_equals_transformers_assistant(structure: str, fused: bool, length: int) -> None:
    model, head = gemma.tiny_verifier(structure), gemma.tiny_head(structure)
    session = Verifier(model, ChainDrafter(head, fused=fused), fused=fused).open()
    generator = np.random.default_rng(length)
    ids = generator.integers(0, gemma.VOCAB, length).tolist()
    session.prime(np.array(ids))
    for _ in range(5):
        root = int(generator.integers(gemma.VOCAB))
        chain = session.draft(root, 4)
        assert list(chain) == transformers_chain(model, head, [*ids, root], 4)
        parents = np.arange(ROOT, len(chain) - 1)
        session.verify(root, np.array(chain), parents)
        kept = int(generator.integers(0, 5))  # rejected rows must not be seen by the next chain
        session.commit(tuple(range(kept)))
        ids += [root, *chain[:kept]]


def test_a_chain_depends_on_the_window_edge() -> None:
    # guards the test above: one key more or less in the sliding layers does change what the head says
    model, head = gemma.tiny_verifier(), gemma.tiny_head()
    changed = 0
    for seed in range(12):
        ids = np.random.default_rng(seed).integers(0, gemma.VOCAB, 30)
        right, wrong = Verifier(model, ChainDrafter(head)).open(), Verifier(model, ChainDrafter(head)).open()
        wrong._verifier.drafter._spans = {"full": None, "sliding": gemma.WINDOW}
        right.prime(ids)
        wrong.prime(ids)
        changed += right.draft(5, 4) != wrong.draft(5, 4)
    assert changed > 0


@pytest.mark.parametrize("length", [1, gemma.WINDOW + 1, 30])
def test_a_restricted_chain_is_the_best_of_the_keep_set_in_every_step(length: int) -> None:
    model, head = gemma.tiny_verifier(), gemma.tiny_head()
    kept = np.arange(1, gemma.VOCAB, 3)
    restricted = ChainDrafter(head, torch.from_numpy(kept), window=100)
    session = Verifier(model, ChainDrafter(head), restricted_drafter=restricted).open()
    ids = np.random.default_rng(length).integers(0, gemma.VOCAB, length).tolist()
    session.prime(np.array(ids))
    chains = [session.draft(root, 4, restricted=True) for root in range(12)]
    assert [list(chain) for chain in chains] == [
        transformers_chain(model, head, [*ids, root], 4, kept) for root in range(12)
    ]
    assert chains != [session.draft(root, 4) for root in range(12)]


def test_a_restricted_chain_sees_the_artifacts_window_and_no_more() -> None:
    model, head, window = gemma.tiny_verifier(), gemma.tiny_head(), 10
    everything = torch.arange(gemma.VOCAB)
    generator = np.random.default_rng(3)
    near, differing = generator.integers(0, gemma.VOCAB, window), 0
    for length in (0, 5, 20):
        ids = np.concatenate([generator.integers(0, gemma.VOCAB, length), near])
        session = Verifier(model, ChainDrafter(head), None, ChainDrafter(head, everything, window)).open()
        session.prime(ids)
        reference = Verifier(model, ChainDrafter(head)).open()
        reference._verifier.drafter._spans = {"full": window, "sliding": gemma.WINDOW + 1}
        reference.prime(ids)
        for root in range(12):
            assert session.draft(root, 4, restricted=True) == reference.draft(root, 4)
            differing += session.draft(root, 4, restricted=True) != session.draft(root, 4)
    assert differing > 0


# --- the hand-off


def handoff_spec(model, hidden_norm: HiddenNorm = "post", window: int = 8) -> HandoffSpec:
    grids = {
        "e": (-9, 8),
        "h": (-30, 31),
        "k.sliding": (-4, 3),
        "v.sliding": (-2, 3),
        "k.full": (-3, 5),
        "v.full": (-3, 3),
    }
    encodings = {name: encoding_from_range(low, high, "uint8") for name, (low, high) in grids.items()}
    return HandoffSpec(gemma.HIDDEN, window, hidden_norm, kv_shapes(model.config), encodings)


@pytest.mark.parametrize("hidden_norm", ["post", "pre"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_handoff_is_what_a_fresh_forward_gives_in_the_artifacts_grids(
    structure: str, hidden_norm: HiddenNorm
) -> None:
    model = gemma.tiny_verifier(structure)
    spec = handoff_spec(model, hidden_norm)
    session = Verifier(model, encoder=HandoffEncoder(spec)).open()
    ids = np.random.default_rng(8).integers(0, gemma.VOCAB, 11).tolist()
    session.prime(np.array(ids[:9]))
    session.verify(ids[9], np.array([40, ids[10], 41]), np.array([ROOT, ROOT, 0]))
    session.commit((1,))
    handoff = session.handoff(7, 5)

    assert handoff.first_position == 6
    rows = spec.unpack_rows(handoff.kv)
    assert rows.count == 5
    _, states, shared = fresh(model, ids)
    expected = {"post": states[-1], "pre": before_norm(model, ids)}[hidden_norm]
    embedding = model.get_input_embeddings()(torch.tensor(7))
    near(handoff.e, embedding, spec.encodings["e"])
    near(handoff.h, expected, spec.encodings["h"])
    for layer_type in ("sliding", "full"):
        keys, values = shared[f"{layer_type}_attention"]
        near(rows.k[layer_type], keys[0, :, 6:].transpose(0, 1), spec.encodings[f"k.{layer_type}"])
        near(rows.v[layer_type], values[0, :, 6:].transpose(0, 1), spec.encodings[f"v.{layer_type}"])


@torch.inference_mode()
def before_norm(model, ids: list[int]) -> torch.Tensor:
    """The final norm's input [H] at the last position."""
    seen = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    hook.remove()
    return seen[0][0, -1]


def near(payload: bytes | np.ndarray, real: torch.Tensor, encoding: Encoding) -> None:
    """Equal integers, but for values that stand within float tolerance of a rounding edge."""
    integers = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
    expected = encoding.quantize(real.numpy())
    assert integers.size == expected.size and integers.std() > 0
    difference = np.abs(integers.reshape(expected.shape).astype(int) - expected)
    assert difference.max() <= 1 and (difference > 0).mean() < 0.02


def test_device_quantisation_is_the_contracts_bit_for_bit() -> None:
    encoding = encoding_from_range(-1.7, 2.9, "uint8")
    real = torch.cat([torch.randn(5000) * 2, torch.tensor([0.0, -1.7, 2.9, 1e9, -1e9])])
    halves = (torch.arange(-150, 150) + 0.5) * encoding.scale  # rounding edges
    values = torch.cat([real, halves])
    assert np.array_equal(quantize(values, encoding).numpy(), encoding.quantize(values.numpy()))


def test_the_bytes_are_those_of_pack_rows() -> None:
    model = gemma.tiny_verifier()
    spec = handoff_spec(model)
    session = Verifier(model, encoder=HandoffEncoder(spec)).open()
    session.prime(np.arange(6))
    handoff = session.handoff(1, 6)
    k, v = {}, {}
    for layer_type in ("sliding", "full"):
        keys, values = committed_rows(session, layer_type)
        k[layer_type] = spec.encodings[f"k.{layer_type}"].quantize(keys.transpose(0, 1).numpy())
        v[layer_type] = spec.encodings[f"v.{layer_type}"].quantize(values.transpose(0, 1).numpy())
    assert handoff.kv == spec.pack_rows(KvRows(k, v))
    assert len(handoff.kv) == 6 * spec.row_bytes and len(handoff.e + handoff.h) == spec.round_bytes


def test_misuse_is_named() -> None:
    session = Verifier(gemma.tiny_verifier()).open()
    with pytest.raises(RuntimeError, match="commit without verify"):
        session.commit(())
    with pytest.raises(RuntimeError, match="draft needs a head and a primed session"):
        session.draft(1, 4)
    with pytest.raises(RuntimeError, match="handoff needs a head artifact and a primed session"):
        session.handoff(1, 1)


# --- other precisions and devices


def test_bfloat16_models_are_served_in_their_own_precision() -> None:
    model = copy.deepcopy(gemma.tiny_verifier()).to(torch.bfloat16)
    head = copy.deepcopy(gemma.tiny_head()).to(torch.bfloat16)
    session = Verifier(model, ChainDrafter(head), HandoffEncoder(handoff_spec(model))).open()
    prompt = np.random.default_rng(1).integers(0, gemma.VOCAB, 15)
    session.prime(prompt)
    assert session.cache.committed(0)[0].dtype == torch.bfloat16
    chain = session.draft(5, 3)
    logits = session.verify(5, np.array(chain), np.arange(ROOT, 2))
    expected = fresh(model, [*prompt.tolist(), 5, *chain])[0][-4:].float().numpy()
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 0.25 * expected.std()  # 8 bits of mantissa through six layers
    session.commit((0, 1))
    assert len(session.handoff(6, 3).kv) == 3 * handoff_spec(model).row_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cuda_session_gives_what_a_cpu_session_gives(compiled: bool) -> None:
    spec = handoff_spec(gemma.tiny_verifier())
    results = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(gemma.tiny_verifier()).to(device)
        head = copy.deepcopy(gemma.tiny_head()).to(device)
        options = {"compiled": compiled and device == "cuda"}
        session = Verifier(model, ChainDrafter(head, **options), HandoffEncoder(spec), **options).open()
        clock = clock_for(model.device, 1)
        mark = clock.start()
        session.prime(np.arange(20) % gemma.VOCAB)
        tokens, parents = random_tree(np.random.default_rng(2), 12)
        logits = session.verify(5, tokens, parents)
        session.commit(path_to(parents.tolist(), 11))
        results.append((logits, session.draft(6, 4), session.handoff(6, 4)))
        assert clock.elapsed_ms(mark) > 0
    (logits, chain, handoff), (cuda_logits, cuda_chain, cuda_handoff) = results
    np.testing.assert_allclose(cuda_logits, logits, atol=TOLERANCE)
    assert cuda_chain == chain and cuda_handoff.first_position == handoff.first_position
    difference = np.frombuffer(cuda_handoff.kv, np.uint8).astype(int) - np.frombuffer(handoff.kv, np.uint8)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.02
