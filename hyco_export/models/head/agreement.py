"""Agreement of two heads' drafts: equal best tokens and KL divergence, by depth, on response tokens.

Both heads read the tokens of the sequence (teacher forcing), and each the state that it projected itself (`unroll`).
Depth 1 is the paper's measure (§3.2: the quantised against the BF16 head).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hyco_export.core.device_spec import GraphSession, GraphSpec, to_integers
from hyco_export.core.network.head import HeadNetwork
from hyco_export.core.network.host import draft_feeds
from hyco_export.core.ring import slot_positions
from hyco_export.models.capture import Capture, load_capture
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.calibration import recorded, spread_roots
from hyco_export.models.head.qat import divergences
from hyco_export.models.head.unroll import FinalNorm, RootRows, response_rows, unroll


@dataclass(frozen=True)
class DepthAgreement:
    """One depth: `top1`, the share of equal best tokens; `kl`, KL(reference || candidate) in nats per token."""

    top1: float
    kl: float
    positions: int


@torch.no_grad()
def compare_heads(
    reference: HeadModel,
    candidate: HeadModel,
    sequences: Sequence[RootRows],
    steps: int,
) -> list[DepthAgreement]:
    """Depths 1 .. steps of the candidate against the reference."""
    same, nats, counts = [0] * steps, [0.0] * steps, [0] * steps
    for rows in sequences:
        pairs = zip(unroll(reference, rows, steps), unroll(candidate, rows, steps), strict=True)
        for depth, (wanted, given) in enumerate(pairs):
            same[depth] += int((wanted.argmax(dim=-1) == given.argmax(dim=-1)).sum())
            nats[depth] += float(divergences(wanted, given).sum())
            counts[depth] += len(wanted)
    return [DepthAgreement(s / n, d / n, n) for s, d, n in zip(same, nats, counts, strict=True) if n]


@torch.no_grad()
def match_verifier(head: HeadModel, sequences: Sequence[RootRows], steps: int) -> list[float]:
    """Share of response tokens that the head's best token equals, by depth. A low one is a sign of wrong inputs."""
    hits, counts = [0] * steps, [0] * steps
    for rows in sequences:
        for depth, logits in enumerate(unroll(head, rows, steps)):
            hits[depth] += int((logits.argmax(dim=-1) == rows.answers[depth:].to(logits.device)).sum())
            counts[depth] += len(logits)
    return [hit / count for hit, count in zip(hits, counts, strict=True) if count]


def share_won_back(candidate: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The share of a baseline's lost agreement that a candidate regains, by depth; 1: all of it, or none was lost."""
    return [(ours - base) / (1.0 - base) if base < 1.0 else 1.0 for ours, base in zip(candidate, baseline, strict=True)]


# ---- the integer graph beside the same weights in float, and beside the original head


@dataclass(frozen=True)
class ComparedPosition:
    """One root of one sequence.

    Attributes:
        read: makes the feeds from the capture, at every use: 6 MB each at real size, for hundreds of positions.
        following: token ids after the root, up to K; fewer at the end of a sequence.
        original: the original head's best token at each of these depths, teacher-forced.
    """

    read: Callable[[], Mapping[str, np.ndarray]]
    following: tuple[int, ...]
    original: tuple[int, ...]

    @property
    def feeds(self) -> Mapping[str, np.ndarray]:
        """The integers that the device would feed to the graph."""
        return self.read()


class _Feeds:
    """Makes feeds from captures; keeps the capture that was read last."""

    def __init__(self, network: HeadNetwork, graph: GraphSpec, mask_value: float) -> None:
        self._network, self._graph, self._mask_value = network, graph, mask_value
        self._path: Path | None = None
        self._values: dict[str, np.ndarray] = {}

    def at(self, path: Path, root: int) -> dict[str, np.ndarray]:
        """The feeds of one root, with K/V in the slots of the device's ring."""
        if path != self._path:
            self._path, self._values = path, recorded(load_capture(path))
        keys = slot_positions(root, self._network.window)
        feeds = draft_feeds(self._network, self._values, np.array([root]), keys, self._mask_value)
        return to_integers(self._graph.inputs, feeds)


def compared_positions(
    network: HeadNetwork,
    graph: GraphSpec,
    paths: Sequence[Path],
    original: HeadModel,
    norm: FinalNorm | None,
    mask_value: float,
    roots_per_sequence: int,
) -> list[ComparedPosition]:
    """Evenly spread response roots of every capture.

    Args:
        paths: captures.
        norm: applied to h for the original head, where h was captured before the verifier's final norm.
    """
    positions, feeds = [], _Feeds(network, graph, mask_value)
    for path in paths:
        capture = load_capture(path, torch.float32)
        if not capture.roots:  # nothing to draft
            continue
        best = _original_tokens(original, capture, network, norm)
        for root in spread_roots(capture, roots_per_sequence):
            row = int(root) - capture.roots.start
            depths = [tokens[row] for tokens in best if row < len(tokens)]
            following = capture.ids[int(root) + 1 :][: len(depths)]
            read = partial(feeds.at, path, int(root))
            positions.append(ComparedPosition(read, tuple(following.tolist()), tuple(depths)))
    return positions


@torch.no_grad()
def _original_tokens(
    head: HeadModel, capture: Capture, network: HeadNetwork, norm: FinalNorm | None
) -> list[list[int]]:
    """Best tokens of the original head, by depth, then by response root; teacher-forced."""
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
    """Share of chain tokens equal to the original head's, by depth, over the positions where both read the same tokens.

    From depth 2 on these are the positions where the chain so far equals the sequence.

    Args:
        kept: [C] token ids of the rows.
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
