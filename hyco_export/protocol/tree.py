"""The draft tree of a round: its form, its checks and what follows from it. Pure numpy.

N nodes with ids of the verifier's vocabulary; the root (the newest committed token) is not a node. Depths, masks and
positions are derived on each side and never sent. A node's position is position(root) + depth, not + row.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np

from hyco_export.errors import ProtocolError

ROOT = -1  # parent of the nodes right under the root


class Source(IntEnum):
    """Who proposed a node."""

    CHAIN = 0
    RUNNER_UP = 1
    SLM = 2


class Tree(msgspec.Struct, frozen=True):
    """tokens, parents (row of the parent, ROOT under the root, parents[i] < i), log_probs, sources: [N] each."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    sources: tuple[Source, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY_TREE = Tree((), ())


def check_tree(tokens: Sequence[int], parents: Sequence[int], vocab_size: int, limit: int) -> None:
    """Check a tree that came over the wire: at most `limit` nodes, known ids, parents first, siblings differ.

    Raises:
        ProtocolError: codes tree_shape, tree_size, token_range, parent_order, duplicate_sibling.
    """
    if len(tokens) != len(parents):
        raise ProtocolError("tree_shape", f"{len(tokens)} tokens but {len(parents)} parents")
    if len(tokens) > limit:
        raise ProtocolError("tree_size", f"{len(tokens)} nodes, at most {limit} are verified in a round")
    seen = set()
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocab_size:
            raise ProtocolError("token_range", f"node {row}: token {token} is outside [0, {vocab_size})")
        if not ROOT <= parent < row:
            raise ProtocolError("parent_order", f"node {row}: parent {parent} is not an earlier node or {ROOT}")
        if (parent, token) in seen:
            raise ProtocolError("duplicate_sibling", f"node {row}: token {token} stands twice under parent {parent}")
        seen.add((parent, token))


def check_kept(kept: Sequence[int], allowed: bool, stop_ids: frozenset[int], room: int) -> None:
    """Check the tokens that the device committed without asking (`wire.VerifyRequest.kept`).

    `allowed`: the session takes unverified tokens; `room`: how many more tokens the session may commit.

    Raises:
        ProtocolError: codes unsupported, value_range.
    """
    if not kept:
        return
    if not allowed:
        raise ProtocolError(
            "unsupported", "kept holds tokens, but the session verifies every token", "prime with `unverified`"
        )
    if not stop_ids.isdisjoint(kept):
        raise ProtocolError("value_range", "kept holds a stop id: the answer had ended there", "delete the session")
    if len(kept) >= room:
        raise ProtocolError("value_range", f"kept holds {len(kept)} tokens, {room} may be committed, one by a round")


def joined(kept: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """`kept` as a chain under the root with the tree under its end: tokens and parents that the verifier forwards."""
    if not kept:
        return tokens, parents
    count = len(kept)
    return [*kept, *tokens], [*range(ROOT, ROOT + count), *(parent + count for parent in parents)]


def joined_path(kept: Sequence[int], accepted: Sequence[int]) -> tuple[int, ...]:
    """Committed rows of the joined tree: the whole chain of `kept`, then the accepted rows of the tree."""
    return (*range(len(kept)), *(row + len(kept) for row in accepted))


def depths(parents: Sequence[int]) -> np.ndarray:
    """Depth [N] of every node; children of the root have depth 1."""
    result = np.zeros(len(parents), dtype=np.int64)
    for row, parent in enumerate(parents):
        result[row] = 1 + (result[parent] if parent != ROOT else 0)
    return result


def path_to(parents: Sequence[int], row: int) -> tuple[int, ...]:
    """Rows from depth 1 down to `row`; empty for ROOT."""
    path: list[int] = []
    while row != ROOT:
        path.append(row)
        row = parents[row]
    return tuple(reversed(path))


def subtree(tree: Tree, root: int) -> tuple[Tree, tuple[int, ...]]:
    """The nodes under row `root` as a tree of their own, log-probabilities relative to it; and their rows in `tree`."""
    place = {root: ROOT}
    rows: list[int] = []
    for row, parent in enumerate(tree.parents):
        if parent in place:
            place[row] = len(rows)
            rows.append(row)
    base = tree.log_probs[root]
    return (
        Tree(
            tuple(tree.tokens[row] for row in rows),
            tuple(place[tree.parents[row]] for row in rows),
            tuple(tree.log_probs[row] - base for row in rows),
            tuple(tree.sources[row] for row in rows),
        ),
        tuple(rows),
    )
