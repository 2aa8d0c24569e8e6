"""How the integer graph of the head drafts: beside the same weights in float, and beside the original head.

Knows sessions, feeds and captures; where they come from is the stage's.

Legend: n compared positions, K steps, S steps with a runner-up, C kept tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.graphspec import GraphSession, GraphSpec
from hyco_export.core.network.boundary import to_integers
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.network.head_host import draft_feeds, ring_positions
from hyco_export.nn.capture import Capture
from hyco_export.nn.final_norm import FinalNorm
from hyco_export.nn.head.calibration import load_all, recorded, spread_roots
from hyco_export.nn.head.unroll import response_rows, unroll


@dataclass(frozen=True)
class ComparedPosition:
    """One root of one sequence, with the integers the device would feed.

    Attributes:
        following: token ids after the root, up to K; fewer at the end of a sequence.
        original: the original head's best token at each of these depths, fed the tokens of the sequence.
    """

    feeds: Mapping[str, np.ndarray]
    following: tuple[int, ...]
    original: tuple[int, ...]


def compared_positions(
    network: HeadNetwork,
    graph: GraphSpec,
    paths: Sequence[Path],
    original: Gemma4AssistantForCausalLM,
    norm: FinalNorm | None,
    mask_value: float,
    roots_per_sequence: int,
) -> list[ComparedPosition]:
    """Evenly spread response roots of every capture, as the device's ring holds them."""
    positions = []
    for capture in load_all(paths):
        best = _original_tokens(original, capture, network, norm)
        values = recorded(capture)
        for root in spread_roots(capture, roots_per_sequence):
            keys = ring_positions(int(root), network.window)
            feeds = draft_feeds(network, values, root[None], keys, mask_value)
            row = int(root) - capture.roots.start
            depths = [tokens[row] for tokens in best if row < len(tokens)]
            following = capture.ids[int(root) + 1 :][: len(depths)]
            positions.append(
                ComparedPosition(to_integers(graph.inputs, feeds), tuple(following.tolist()), tuple(depths))
            )
    return positions


@torch.no_grad()
def _original_tokens(
    head: Gemma4AssistantForCausalLM, capture: Capture, network: HeadNetwork, norm: FinalNorm | None
) -> list[list[int]]:
    """Best tokens of the original head, by depth then response root."""
    rows = response_rows(capture, network.architecture.spans, network.window, norm)
    return [logits.argmax(dim=-1).tolist() for logits in unroll(head, rows, network.steps)]


@dataclass(frozen=True)
class Drafts:
    """What a session drafted at n positions: chain [n, K] and runner-ups [n, S], kept rows."""

    chain: np.ndarray
    runner_up: np.ndarray


def run_session(session: GraphSession, positions: Sequence[ComparedPosition]) -> Drafts:
    """Draft at every position."""
    outputs = [session.run(position.feeds) for position in positions]
    none = np.zeros(0, np.int32)
    chain = np.stack([output["chain"] for output in outputs])
    return Drafts(chain, np.stack([output.get("runner_up", none) for output in outputs]))


@dataclass(frozen=True)
class DepthShare:
    """Share of equal tokens at one depth over `positions`."""

    share: float
    positions: int


def match_original(drafts: Drafts, positions: Sequence[ComparedPosition], kept: np.ndarray) -> list[DepthShare]:
    """Share of chain tokens equal to the original head's, by depth, where both were fed the same tokens.

    From depth 2 on that is where the chain so far equals the sequence. `kept` [C] are the ids of the rows.
    """
    steps = drafts.chain.shape[1]
    equal, counts = [0] * steps, [0] * steps
    for rows, position in zip(drafts.chain, positions, strict=True):
        for depth, wanted in enumerate(position.original):
            counts[depth] += 1
            token = int(kept[rows[depth]])
            equal[depth] += token == wanted
            if token != position.following[depth]:
                break
    return [DepthShare(e / n if n else 0.0, n) for e, n in zip(equal, counts, strict=True)]
