"""Reference values stored beside a converted head and its graphs: golden positions, and sample feeds.

Golden positions say what a correct verifier hands off at some places of known texts and what the head drafts from it,
so that another machine can detect a wrong server or device by comparing. A session runs as a device runs it: PRIME with
the text before its first root, then rounds that send the text's own next K tokens, all of which a greedy server
accepts; its roots are therefore K + 1 positions apart. Probabilities are compared on trees of their own. The hand-offs
lie in files beside the JSON (`golden_text_file`, in the layout of `models.capture`).

Sample feeds are inputs of a graph, saved by the stage that makes it and run again by those that compile or judge it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hyco_export.core.data.conversations import Message
from hyco_export.core.files import write_json
from hyco_export.errors import ArtifactError

GOLDEN_FILE = "golden.json"
LIKELY_ROOT = 0.5  # least probability of a golden tree's root, where a text has one: every other seed draws it
SHOWN_LOGITS = 16  # of a step, the highest over the kept tokens: thousands in all, enough to detect small errors
SEPARATOR = "/"  # in the names of stored feeds: <graph>/<input>
Feeds = Mapping[str, np.ndarray]


class GoldenRoot(msgspec.Struct, frozen=True):
    """One place to draft at, and what transformers' head drafts there with the artifact's weights and window.

    `top[k]` are the kept ids with the highest logits of step k + 1, best first, so that `chain[k] == top[k][0]`;
    `logits[k]` are theirs. `server_chain` is that of the original head, over the full vocabulary and the whole prefix;
    `server_accepted` of its tokens are confirmed by the text.
    """

    position: int
    top: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[float, ...], ...]
    server_accepted: int
    server_chain: tuple[int, ...]

    @property
    def chain(self) -> tuple[int, ...]:
        return tuple(step[0] for step in self.top)


class GoldenDraw(msgspec.Struct, frozen=True):
    """What a correct verifier draws with one seed that draws the tree's root.

    tokens [R]: at `GoldenTree.rows`. margins [R]: how far the draw's number u is from where another token begins, in
    probability; root_margin: the same of PRIME's draw, which is the root.
    """

    seed: int
    root_margin: float
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


class GoldenDistribution(msgspec.Struct, frozen=True):
    """Probabilities of a tree's N nodes by a correct verifier under one sampling.

    log_probs [N], entropies (of `GoldenTree.rows`): of softmax(logits / T), nothing cut, in nats. probs [N]: after
    top-k and top-p. edges [N]: by how much a node's log p lies above (below: < 0) what the cuts let pass.
    root_prob: of the root, after the cuts, behind the prompt. draws: of the first seeds that draw the root.
    """

    temperature: float
    top_k: int
    top_p: float
    log_probs: tuple[float, ...]
    probs: tuple[float, ...]
    edges: tuple[float, ...]
    entropies: tuple[float, ...]
    root_prob: float
    draws: tuple[GoldenDraw, ...]


class GoldenTree(msgspec.Struct, frozen=True):
    """A tree of N nodes after a root of a captured answer, as transformers' own model and warpers judge it.

    prompt: all ids before the root. logits [N]: of each node's token after its parent; plain_logits [N]: without the
    final soft-cap, which is `soft_cap` (None: the model has none, both are the same).
    """

    prompt: tuple[int, ...]
    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    soft_cap: float | None
    logits: tuple[float, ...]
    plain_logits: tuple[float, ...]
    distributions: tuple[GoldenDistribution, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows (0: the root, i + 1: node i) with children: those whose distributions are stored."""
        return tuple(sorted({parent + 1 for parent in self.parents}))

    @property
    def root_prob(self) -> float:
        """Probability of the root under the sampling that draws it least often."""
        return min(each.root_prob for each in self.distributions)


class GoldenSession(msgspec.Struct, frozen=True):
    """One session over text number `text`."""

    text: int
    roots: tuple[GoldenRoot, ...]


class GoldenText(msgspec.Struct, frozen=True):
    """A conversation as the verifier read it: the ids of its prompt."""

    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]


class Golden(msgspec.Struct, frozen=True):
    """All golden positions of a head.

    `window`: positions a sliding layer of the verifier sees, its own included. `chain_acceptance[k]`: share of roots
    whose first k + 1 drafted tokens the text confirms.
    """

    steps: int
    window: int
    chain_acceptance: tuple[float, ...]
    server_accepted_mean: float
    texts: tuple[GoldenText, ...]
    sessions: tuple[GoldenSession, ...]
    trees: tuple[GoldenTree, ...]

    @property
    def root_count(self) -> int:
        return sum(len(session.roots) for session in self.sessions)


def golden_text_file(number: int) -> str:
    """Name of the file with the hand-off at every position of a text."""
    return f"golden-{number}.safetensors"


def accepted_length(chain: tuple[int, ...], following: tuple[int, ...]) -> int:
    """How many leading tokens of a chain the text confirms."""
    equal = [ours == theirs for ours, theirs in zip(chain, following, strict=False)]
    return next((depth for depth, same in enumerate(equal) if not same), len(equal))


def acceptance_by_depth(lengths: list[int], steps: int) -> tuple[float, ...]:
    """Share of chains accepted up to each depth 1 .. K, from their accepted lengths."""
    return tuple(sum(length > depth for length in lengths) / max(1, len(lengths)) for depth in range(steps))


def write_golden(folder: Path, golden: Golden) -> None:
    """Store golden positions as JSON."""
    write_json(folder / GOLDEN_FILE, golden)


def read_golden(folder: Path) -> Golden:
    """The golden positions of a `convert-head` artifact.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    path = folder / GOLDEN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Golden)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build it again: hyco-export convert-head") from error


def write_samples(path: Path, samples: Mapping[str, Sequence[Feeds]]) -> None:
    """Store feeds by graph name; all feeds of a graph have the same inputs and shapes."""
    stacked = {
        f"{graph}{SEPARATOR}{name}": np.stack([feed[name] for feed in feeds])
        for graph, feeds in samples.items()
        for name in feeds[0]
    }
    save_file(stacked, path)


def read_samples(path: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Feeds by graph name, in the order they were written.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    try:
        stacked = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"sample feeds {path} cannot be read: {error}", "build the stage that wrote them"
        ) from error
    samples: dict[str, list[dict[str, np.ndarray]]] = {}
    for key, tensor in stacked.items():
        graph, name = key.split(SEPARATOR, 1)
        feeds = samples.setdefault(graph, [{} for _ in tensor])
        for feed, values in zip(feeds, tensor, strict=True):
            feed[name] = values
    return samples
