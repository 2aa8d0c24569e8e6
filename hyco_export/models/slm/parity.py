"""Is the static SLM the model that transformers computes? Logits of plain, wrapped and branching contexts.

The static side goes through its rings pass by pass; transformers runs everything in one forward pass under 4D masks
that show each row exactly what the rings show it. Both are in float.

Legend: n tokens, R rows of a pass, W ring slots, V kept tokens.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from hyco_export.core.network.host import EmbeddingRows, SlmHost
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.ring import NO_PARENT
from hyco_export.models.families.slm_family import LONG_NAMES
from hyco_export.models.slm.calibration import random_forest
from hyco_export.models.slm.static_pass import FloatSlm

MASK_VALUE = -100.0  # exp(-100) is 0 in float32 beside any visible score
TREE_SEED = 20261011
SHORTENED_VALUES = 50_000_000  # weights of a model whose contexts are shortened
SHORTENED_PASSES = 2  # of the longest ring
OUTPUT_PARAMETERS = ("weight", "weight_scale", "bias")


@dataclass(frozen=True)
class Scenario:
    """A context of consecutive tokens, then one pass over a forest on top of it (empty: none)."""

    name: str
    context: int
    parents: tuple[int, ...]


def scenarios(rings: dict[str, int], rows: int) -> tuple[Scenario, ...]:
    """Contexts that end inside every ring, that wrap every ring twice, and random trees on both."""
    shortest, longest = min(rings.values()), max(rings.values())
    short, wrapped = shortest - 1, 2 * longest + rows // 2 + 1  # neither ends with a full pass
    generator = np.random.default_rng(TREE_SEED)
    tree = tuple(random_forest(rows, generator))
    return (
        Scenario("plain", short, ()),
        Scenario("wrapped", wrapped, ()),
        Scenario("tree", short, tree),
        Scenario("tree_wrapped", wrapped, tree),
    )


def shortened(network: SlmNetwork, rows: int) -> SlmNetwork:
    """The same network over rings and spans so short that two passes fill the longest.

    A pass of a model of E2B's size takes seconds, and a context that wraps rings of 1,024 slots twice takes 66. What a
    ring does is the same at any length; the window that the model itself has is compared as a number by `comparison`.
    """
    longest = max(network.rings.values())
    share = min(1.0, SHORTENED_PASSES * rows / longest)
    rings = {name: max(rows, int(ring * share)) for name, ring in network.rings.items()}
    spans = {name: None if span is None else max(rows, int(span * share)) for name, span in network.spans.items()}
    return msgspec.structs.replace(network, rings=rings, spans=spans)


class Comparison(NamedTuple):
    """What is compared: a static network, the window on transformers' side, and contexts."""

    slm: FloatSlm
    window: int | None
    cases: tuple[Scenario, ...]


def comparison(stock: Any, slm: FloatSlm, rows: int) -> Comparison:
    """All scenarios under the model's own window; for a large model those with a forest (their contexts are judged as
    well), over shortened rings and window.

    Raises:
        ValueError: the static network's window is not the model's.
    """
    own, window = slm.network.spans.get("sliding"), getattr(stock.config, "sliding_window", None)
    if slm.value_count <= SHORTENED_VALUES:
        return Comparison(slm, window, scenarios(slm.network.rings, rows))
    if own not in (None, window):
        raise ValueError(f"the static network's window is {own}, the model's {window}")
    short = slm.over(shortened(slm.network, rows))
    cases = scenarios(short.network.rings, rows)
    return Comparison(
        short, short.network.spans.get("sliding") or window, tuple(case for case in cases if case.parents)
    )


def relative_difference(
    stock: Any,
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    kept: np.ndarray,
    ids: Sequence[int],
    rows: int,
    case: Scenario,
    window: int | None,
) -> float:
    """Largest |difference| of the logits of all rows over the kept tokens, in standard deviations of transformers'.

    0 for logits that are all the same on both sides, as of an output layer of zeros.

    Args:
        window: of sliding attention on transformers' side.
    """
    tokens = np.resize(np.asarray(ids), case.context + len(case.parents))
    ours = static_logits(slm, embeddings, tokens, rows, case)
    with output_of(stock, kept):
        theirs = stock_logits(stock, slm.network.rings, tokens, rows, case, window)
    largest, spread = float(np.abs(ours - theirs).max()), float(theirs.std())
    return largest / spread if spread else (0.0 if largest == 0.0 else math.inf)


@contextmanager
def output_of(stock: Any, kept: np.ndarray) -> Iterator[None]:
    """transformers' model with the rows `kept` of its output layer alone: the whole one takes gigabytes in float32."""
    whole = stock.lm_head
    part = copy.copy(whole)
    part._parameters = dict(whole._parameters)
    for name in OUTPUT_PARAMETERS:
        if part._parameters.get(name) is not None:
            rows = part._parameters[name].data[torch.from_numpy(kept.astype(np.int64))]
            part._parameters[name] = torch.nn.Parameter(rows, requires_grad=False)
    stock.lm_head = part
    try:
        yield
    finally:
        stock.lm_head = whole


def static_logits(
    slm: FloatSlm, embeddings: EmbeddingRows, tokens: np.ndarray, rows: int, case: Scenario
) -> np.ndarray:
    """[n, V] in order of the tokens, made pass by pass."""
    host = SlmHost(slm.network, embeddings, rows, MASK_VALUE)
    parts = []
    for start in range(0, case.context, rows):
        chunk = tokens[start : min(start + rows, case.context)]
        parts.append(host.append(slm.tree, chunk)["logits"][: len(chunk)])
    if case.parents:
        feeds = host.feeds(tokens[case.context :], case.parents)
        parts.append(slm.tree(feeds)["logits"][: len(case.parents)])
    return np.concatenate(parts)


@torch.no_grad()
def stock_logits(
    stock: Any, rings: dict[str, int], tokens: np.ndarray, rows: int, case: Scenario, window: int | None
) -> np.ndarray:
    """[n, V] of transformers' model when rings of these capacities, and the window, decide what a row sees."""
    positions = np.concatenate([np.arange(case.context), case.context + depths(case.parents)])
    spans = {"sliding": window, "full": None}
    masks = {}
    for layer_type, ring in rings.items():
        seen = visibility(case, rows, ring) & within(positions, spans[layer_type])
        mask = np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32)
        masks[LONG_NAMES[layer_type]] = torch.from_numpy(mask)[None, None]  # [1, 1, n, n]
    output = stock(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        position_ids=torch.from_numpy(positions.astype(np.int64))[None],
        attention_mask=masks if hasattr(stock.config, "layer_types") else masks[LONG_NAMES["full"]],
        use_cache=False,
    )
    return output.logits[0].numpy()


def visibility(case: Scenario, rows: int, ring: int) -> np.ndarray:
    """bool [n, n]: does the ring (its newest W positions before the pass) or the pass itself show row i the row j."""
    count = case.context + len(case.parents)
    seen = np.zeros((count, count), bool)
    for row in range(case.context):
        first = row - row % rows  # of this pass
        seen[row, max(0, first - ring) : row + 1] = True
    for node, parent in enumerate(case.parents):
        row = case.context + node
        seen[row, max(0, case.context - ring) : case.context] = True
        if parent != NO_PARENT:
            seen[row] |= seen[case.context + parent]
        seen[row, row] = True
    return seen


def within(positions: np.ndarray, span: int | None) -> np.ndarray:
    """bool [n, n]: is position j among the `span` newest counted from i."""
    distance = positions[:, None] - positions[None, :]
    return distance >= 0 if span is None else (distance >= 0) & (distance < span)


def depths(parents: Sequence[int]) -> np.ndarray:
    """[n] edges between a node and the top of its tree."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == NO_PARENT else found[parent] + 1)
    return np.asarray(found, np.int64)
