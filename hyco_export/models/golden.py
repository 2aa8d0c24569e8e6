"""Golden drafts: which positions are chosen, and what transformers' own head drafts there.

The reference shares no code with the graphs: transformers' module with its own masks, one row at a time, fed what is
sent to a device, the 8-bit hand-off values of the newest W positions. The static network, the graphs and the device's
host code must give the same drafts.

Legend: T tokens of a text, K steps, W positions of the device's window, C kept tokens, H the verifier's hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import (
    LIKELY_ROOT,
    SHOWN_LOGITS,
    GoldenDistribution,
    GoldenRoot,
    GoldenTree,
    accepted_length,
)
from hyco_export.core.handoff import LAYER_TYPES
from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, STATE_HALF
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable
from hyco_export.core.recipe import Sampling
from hyco_export.models.capture import Capture
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.generation_rules import suppressed_ids
from hyco_export.models.golden_draws import Ruler, golden_draws
from hyco_export.models.head.quantisers import linear_layers, load_weight
from hyco_export.models.head.stored import stored_name
from hyco_export.models.head.unroll import FinalNorm
from hyco_export.models.verifier import ATTENTION_NAMES

LONG_TEXTS, SHORT_TEXTS = 2, 4
EDGE_ROUNDS, SHORT_ROUNDS, LONG_ROUNDS = 5, 3, 1
BEFORE_EDGE = 2  # rounds that end before the sliding window's edge, where a text allows it

Embed = Callable[[int], torch.Tensor]  # token id -> [H]


@dataclass(frozen=True)
class Walk:
    """A session to be: `rounds` of K + 1 tokens after the first root."""

    text: int
    start: int
    rounds: int

    def roots(self, steps: int) -> list[int]:
        return [self.start + number * (steps + 1) for number in range(self.rounds + 1)]


def choose_walks(texts: Sequence[tuple[int, int]], window: int, steps: int) -> list[Walk]:
    """Sessions over texts of (answer start, tokens): short ones; on the longest texts one whose rounds cross the
    verifier's sliding window, and one primed beyond it. Texts that are too short are left out."""
    by_length = sorted(range(len(texts)), key=lambda text: -texts[text][1])
    longest, others = by_length[:LONG_TEXTS], sorted(by_length[LONG_TEXTS:])
    spread = np.unique(np.linspace(0, len(others) - 1, min(SHORT_TEXTS, len(others))).round().astype(int))
    wanted = [Walk(others[index], texts[others[index]][0], SHORT_ROUNDS) for index in spread]
    for text in longest:
        start, tokens = texts[text]
        wanted.append(Walk(text, max(start, window - BEFORE_EDGE * (steps + 1)), EDGE_ROUNDS))
        late = _last_root(tokens, steps) - LONG_ROUNDS * (steps + 1)
        if late >= start and late > window:
            wanted.append(Walk(text, late, LONG_ROUNDS))
    return [walk for each in wanted if (walk := _shortened(each, texts[each.text][1], steps)).rounds >= 0]


def _last_root(tokens: int, steps: int) -> int:
    """The last root whose chain can be compared; a text's last token may be a stop, which is never sent."""
    return tokens - 2 - steps


def _shortened(walk: Walk, tokens: int, steps: int) -> Walk:
    """With as many rounds as the text has room for; -1 when it has none for the first root."""
    room = (_last_root(tokens, steps) - max(walk.start, 1)) // (steps + 1)
    return Walk(walk.text, max(walk.start, 1), max(-1, min(walk.rounds, room)))


def load_stored(head: HeadModel, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the artifact's weights into transformers' module; a matrix that is stored in two is put together again."""
    for name, layer in linear_layers(head):
        stored = stored_name(name)
        if stored == PRE_PROJECTION and stored not in matrices:
            real = np.concatenate([matrices[EMBEDDING_HALF].real(), matrices[STATE_HALF].real()], axis=1)
        else:
            real = matrices[stored].real()
        load_weight(layer, torch.from_numpy(real))
    # the table it was tied to, which a head never looks up, would stay beside it: a gigabyte
    head.get_input_embeddings().weight = head.lm_head.weight


def on_grids(capture: Capture, grids: Mapping[str, Encoding]) -> Capture:
    """What arrives of a capture when it travels in these grids, float32."""

    def arrive(name: str, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(grids[name].dequantize(grids[name].quantize(values.float().numpy())))

    arrived: list[dict[str, torch.Tensor]] = [
        {layer_type: arrive(f"{kind}.{layer_type}", rows[layer_type]) for layer_type in LAYER_TYPES}
        for kind, rows in (("k", capture.k), ("v", capture.v))
    ]
    return Capture(capture.ids, capture.answer_start, arrive("e", capture.e), arrive("h", capture.h), *arrived)


def table_lookup(table: IntegerTable, kept: np.ndarray) -> Embed:
    """Embeddings of kept tokens from the 8-bit table."""
    return lambda token: torch.from_numpy(table.real(np.searchsorted(kept, [token])))[0]


@torch.no_grad()
def chain_logits(
    head: HeadModel,
    capture: Capture,
    root: int,
    window: int,
    steps: int,
    norm: FinalNorm | None,
    embed: Embed,
    kept: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Logits [C] of K steps at `root`, each fed the best token of the one before; `kept` [C] None: over all tokens."""
    first = max(0, root - window)
    keys_values = {
        ATTENTION_NAMES[kind]: (
            capture.k[kind][first:root].transpose(0, 1)[None],
            capture.v[kind][first:root].transpose(0, 1)[None],
        )
        for kind in LAYER_TYPES
    }
    state = capture.h[root - 1]
    embedding, state = capture.e[root], state if norm is None else norm(state)
    found = []
    for _ in range(steps):
        output = head(
            inputs_embeds=torch.cat([embedding, state])[None, None],
            attention_mask=torch.ones(1, root - first + 1),
            position_ids=torch.tensor([[root]]),
            shared_kv_states=keys_values,
            use_cache=False,
        )
        logits = output.logits[0, 0] if kept is None else output.logits[0, 0][kept]
        found.append(logits)
        best = int(logits.argmax())
        embedding = embed(best if kept is None else int(kept[best])).to(state.dtype)
        state = output.last_hidden_state[0, 0]
    return found


def golden_root(
    root: int, kept: np.ndarray, logits: Sequence[torch.Tensor], server_chain: Sequence[int], ids: Sequence[int]
) -> GoldenRoot:
    """What is kept of one root: the highest logits [C] of every step; `ids` is the whole text."""
    top = [step.topk(min(SHOWN_LOGITS, len(kept))) for step in logits]
    following = tuple(ids[root + 1 : root + 1 + len(server_chain)])
    return GoldenRoot(
        position=root,
        top=tuple(tuple(int(kept[row]) for row in step.indices) for step in top),
        logits=tuple(tuple(step.values.tolist()) for step in top),
        server_accepted=accepted_length(tuple(server_chain), following),
        server_chain=tuple(server_chain),
    )


# ---- a verifier's tree: probabilities by transformers' own forward pass, soft-cap and logits warpers

DEPTH = 5  # nodes of the path below the root
PLACES = 16  # of an answer's beginning, one of which becomes the root
RANKS = (0, 1, 2, 9, 24, 5, 15, 40, 79)  # of a row's children, beside those at the cuts, in order of preference
CHILDREN = 9  # of a row, and the text's token: 60 nodes of a tree's 64
FIXED_SAMPLINGS = (  # beside the recipe's: nothing cut, a tight top-k in the cold, a tight top-p in the heat
    Sampling(temperature=1.0, top_k=0, top_p=1.0),
    Sampling(temperature=0.6, top_k=4, top_p=1.0),
    Sampling(temperature=1.5, top_k=0, top_p=0.7),
)
FAR = 99.0  # nats: of a node that no cut can reach


def samplings(chosen: Sampling) -> tuple[Sampling, ...]:
    """Those compared: fixed ones, and the recipe's where it samples, also without its top-p, which may hide the edge of
    its top-k."""
    wide = Sampling(chosen.temperature, chosen.top_k, top_p=1.0)
    return tuple(dict.fromkeys((*FIXED_SAMPLINGS, *([wide, chosen] if chosen.temperature else []))))


def child_ranks(kinds: Sequence[Sampling]) -> tuple[int, ...]:
    """Ranks (0: the likeliest) of a row's children: the last inside and the first outside every top-k, then RANKS."""
    at_cuts = [rank for kind in kinds if kind.top_k for rank in (kind.top_k - 1, kind.top_k)]
    return tuple(sorted(list(dict.fromkeys([*at_cuts, *RANKS]))[:CHILDREN]))


@torch.no_grad()
def golden_tree(model: PreTrainedModel, ids: Sequence[int], answer_start: int, chosen: Sampling) -> GoldenTree | None:
    """The tree behind a root that sampling is likely to draw; None where the answer is too short.

    Args:
        ids: prompt and answer.
        chosen: the recipe's sampling.
    """
    first, end = max(answer_start, 1), min(len(ids) - 1 - DEPTH, answer_start + PLACES)
    if end <= first:
        return None
    config = model.config.get_text_config()
    tokens = torch.tensor([list(ids[: end + DEPTH])], device=model.device)
    rows = torch.arange(first - 1, end + DEPTH, device=model.device)  # row i stands at position first - 1 + i
    logits = _logits(model, tokens, rows)
    with _without_soft_cap(config):
        plain = _logits(model, tokens, rows)
    kinds = samplings(chosen)
    found = [_root_prob(logits, ids[first:end], kind) for kind in kinds]  # [places] each
    place = _best_place(torch.stack(found).amin(dim=0), logits)
    root = first + place
    here = slice(place + 1, place + 2 + DEPTH)  # rows of the tree among those of the pass
    children, parents = _nodes(logits[here], ids[root + 1 : root + 1 + DEPTH], child_ranks(kinds))
    inner = sorted(set(parents))
    at = torch.tensor([inner.index(parent) for parent in parents]), torch.tensor(children)
    tree_rows = [parent + 1 for parent in inner]
    behind = slice(place, place + 2 + DEPTH)  # the row that the root is drawn from, then those of the tree
    return GoldenTree(
        prompt=tuple(ids[:root]),
        root=int(ids[root]),
        tokens=tuple(children),
        parents=tuple(parents),
        soft_cap=config.final_logit_softcapping,
        logits=tuple(logits[here][at].tolist()),
        plain_logits=tuple(plain[here][at].tolist()),
        distributions=tuple(
            _distribution(logits[behind], at, kind, float(each[place]), int(ids[root]), root, tree_rows)
            for kind, each in zip(kinds, found, strict=True)
        ),
    )


def _best_place(root_probs: torch.Tensor, logits: torch.Tensor) -> int:
    """Of the likely roots the one whose rows leave most open: cuts show there. logits [places + R, V]."""
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    open_there = entropies[1:].unfold(0, DEPTH + 1, 1).sum(dim=-1)[: len(root_probs)]
    likely = root_probs >= LIKELY_ROOT
    return int(open_there.masked_fill(~likely, -1.0).argmax() if likely.any() else root_probs.argmax())


def _logits(model: PreTrainedModel, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits float32 [len(rows), V] of these positions of tokens [1, T], as transformers' sampling gets them."""
    forward: Any = model
    logits = forward(tokens, use_cache=False, logits_to_keep=rows).logits[0].float().cpu()
    if ids := suppressed_ids(model):
        logits = SuppressTokensLogitsProcessor(list(ids), device="cpu")(tokens, logits)
    return logits


@contextmanager
def _without_soft_cap(config: Any) -> Iterator[None]:
    """The model's own forward without its last step."""
    cap = config.final_logit_softcapping
    config.final_logit_softcapping = None
    try:
        yield
    finally:
        config.final_logit_softcapping = cap


def _nodes(logits: torch.Tensor, path: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents: under each of the R rows its tokens of these ranks, and the path's next one."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for row, scores in enumerate(logits):
        order = scores.argsort(descending=True, stable=True)
        usable = int(scores.isfinite().sum())
        children = [int(order[rank]) for rank in ranks if rank < usable]
        following = path[row : row + 1]
        children = list(dict.fromkeys([*following, *children]))
        first = len(tokens)
        tokens += children
        parents += [parent] * len(children)
        parent = first  # the path's token comes first
    return tokens, parents


def _warped(logits: torch.Tensor, kind: Sampling) -> torch.Tensor:
    """Scores [..., V] after transformers' warpers, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(kind.temperature))])
    if kind.top_k:
        warpers.append(TopKLogitsWarper(kind.top_k))
    if kind.top_p < 1.0:
        warpers.append(TopPLogitsWarper(kind.top_p))
    return warpers(cast(Any, torch.zeros(len(logits), 1, dtype=torch.long)), cast(Any, logits.clone()))


def _root_prob(logits: torch.Tensor, following: Sequence[int], kind: Sampling) -> torch.Tensor:
    """Probability after the cuts of each of `following` [places] behind the row before it."""
    probs = _warped(logits[: len(following)], kind).softmax(dim=-1)
    return probs.gather(1, torch.tensor(following)[:, None])[:, 0]


def _distribution(
    logits: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    kind: Sampling,
    root_prob: float,
    root: int,
    root_position: int,
    rows: Sequence[int],
) -> GoldenDistribution:
    """logits [1 + R, V]: before the root, then of the tree's `rows`; `at`: which of these is a node's parent, and its
    token."""
    log_probs = (logits.double() / kind.temperature).log_softmax(dim=-1)
    warped = _warped(logits, kind)
    edges = _edges(log_probs, kind)
    rulers = [Ruler(*each) for each in zip(log_probs.numpy(), warped.isfinite().numpy(), edges.numpy(), strict=True)]
    log_probs, warped, edges = log_probs[1:], warped[1:], edges[1:]
    entropies = -(log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(dim=-1)
    return GoldenDistribution(
        temperature=kind.temperature,
        top_k=kind.top_k,
        top_p=kind.top_p,
        log_probs=tuple(log_probs[at].tolist()),
        probs=tuple(warped.softmax(dim=-1)[at].tolist()),
        edges=tuple(edges[at].tolist()),
        entropies=tuple(entropies.tolist()),
        root_prob=root_prob,
        draws=golden_draws(root, root_position, rows, rulers),
    )


def _edges(log_probs: torch.Tensor, kind: Sampling) -> torch.Tensor:
    """[R, V]: how far log p is from what decides of the token: the k-th score, or the mass that top-p cuts."""
    order = log_probs.argsort(dim=-1, descending=True)
    ranked = log_probs.gather(1, order)
    edges = torch.full_like(ranked, FAR)
    if kind.top_k and kind.top_k < ranked.shape[1]:
        inside, outside = ranked[:, kind.top_k - 1 : kind.top_k], ranked[:, kind.top_k : kind.top_k + 1]
        edges = torch.where(ranked >= inside, ranked - outside, ranked - inside)
    if kind.top_p < 1.0:
        left = ranked.masked_fill(edges < 0, -torch.inf).softmax(dim=-1)
        tail = left.flip(-1).cumsum(dim=-1).flip(-1)  # mass of a token and all behind it
        by_mass = torch.log(tail / (1 - kind.top_p))
        by_mass[:, 0] = FAR  # one token stays
        edges = torch.where(edges < 0, edges, torch.minimum(edges, by_mass))
    return torch.empty_like(edges).scatter(1, order, edges.clamp(-FAR, FAR))
