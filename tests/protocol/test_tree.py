"""Draft trees: what is refused with which code, and what follows from parents alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.core.ring import ancestor_mask
from hyco_export.errors import ProtocolError
from hyco_export.protocol.tree import (
    EMPTY_TREE,
    ROOT,
    Source,
    Tree,
    check_kept,
    check_tree,
    depths,
    joined,
    joined_path,
    path_to,
    subtree,
)

VOCAB, LIMIT = 10, 4
#        root
#       /    \
#      0      1
#     / \      \
#    2   3      4
#        |
#        5
PARENTS = (ROOT, ROOT, 0, 0, 1, 3)
TREE = Tree(
    tokens=(3, 4, 5, 6, 7, 8),
    parents=PARENTS,
    log_probs=(-1.0, -2.0, -3.0, -4.0, -5.0, -6.5),
    sources=(Source.CHAIN, Source.RUNNER_UP, Source.CHAIN, Source.SLM, Source.SLM, Source.CHAIN),
)


@st.composite
def parents_of_any_tree(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(ROOT, row - 1)) for row in range(draw(st.integers(0, 12)))]


@pytest.mark.parametrize(
    ("tokens", "parents", "code", "says"),
    [
        ([1, 2], [ROOT], "tree_shape", "2 tokens but 1 parents"),
        ([1, 2, 3, 4, 5], [ROOT] * 5, "tree_size", "5 nodes, at most 4 are verified in a round"),
        ([1, VOCAB], [ROOT, 0], "token_range", r"node 1: token 10 is outside \[0, 10\)"),
        ([-1], [ROOT], "token_range", r"node 0: token -1 is outside"),
        ([1], [0], "parent_order", "node 0: parent 0 is not an earlier node or -1"),
        ([1, 2], [ROOT, 1], "parent_order", "node 1: parent 1"),
        ([1], [-2], "parent_order", "node 0: parent -2"),
        ([1, 2, 2], [ROOT, 0, 0], "duplicate_sibling", "node 2: token 2 stands twice under parent 0"),
        ([1, 1], [ROOT, ROOT], "duplicate_sibling", "token 1 stands twice under parent -1"),
    ],
)
def test_what_is_no_tree_is_refused_by_code(tokens: list[int], parents: list[int], code: str, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        check_tree(tokens, parents, VOCAB, LIMIT)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([], []), ([0, VOCAB - 1], [ROOT, ROOT]), ([1, 1, 1, 1], [ROOT, 0, 1, 2]), ([1, 2, 3, 3], [ROOT, ROOT, 0, 1])],
)
def test_trees_up_to_the_limit_pass(tokens: list[int], parents: list[int]) -> None:
    check_tree(tokens, parents, VOCAB, LIMIT)


@pytest.mark.parametrize(
    ("kept", "allowed", "room", "code"),
    [
        ([1], False, 9, "unsupported"),
        ([1, 7], True, 9, "value_range"),  # 7 is a stop id
        ([1, 2, 3], True, 3, "value_range"),  # the round itself commits one more
    ],
)
def test_kept_tokens_need_leave_room_and_no_stop_id(kept: list[int], allowed: bool, room: int, code: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_kept(kept, allowed, frozenset({7}), room)
    assert caught.value.code == code


def test_kept_tokens_within_the_rules_pass() -> None:
    check_kept([], False, frozenset({7}), 0)
    check_kept([1, 2], True, frozenset({7}), 3)


def test_kept_tokens_become_a_chain_over_the_tree() -> None:
    tokens, parents = joined([8, 9], TREE.tokens, TREE.parents)
    assert list(tokens) == [8, 9, 3, 4, 5, 6, 7, 8]
    assert list(parents) == [ROOT, 0, 1, 1, 2, 2, 3, 5]
    assert joined([], TREE.tokens, TREE.parents) == (TREE.tokens, TREE.parents)
    assert joined_path([8, 9], (0, 3)) == (0, 1, 2, 5)
    assert joined_path([], (0, 3)) == (0, 3)


def test_depths_paths_and_ancestors_of_a_drawn_tree() -> None:
    assert depths(PARENTS).tolist() == [1, 1, 2, 2, 2, 3]
    assert [path_to(PARENTS, row) for row in (ROOT, 1, 5)] == [(), (1,), (0, 3, 5)]
    mask = ancestor_mask(PARENTS)
    assert [np.flatnonzero(row).tolist() for row in mask] == [[0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5]]
    assert depths(()).shape == (0,) and ancestor_mask(()).shape == (0, 0)


@given(parents_of_any_tree())
def test_the_mask_holds_the_path_of_every_node_and_its_depth(parents: list[int]) -> None:
    mask, depth = ancestor_mask(parents), depths(parents)
    for row in range(len(parents)):
        path = path_to(parents, row)
        assert np.flatnonzero(mask[row]).tolist() == sorted(path)
        assert depth[row] == len(path)
        assert [parents[node] for node in path] == [ROOT, *path[:-1]]


def test_a_subtree_is_a_tree_relative_to_its_root() -> None:
    found, rows = subtree(TREE, 0)
    assert rows == (2, 3, 5)
    assert found == Tree((5, 6, 8), (ROOT, ROOT, 1), (-2.0, -3.0, -5.5), (Source.CHAIN, Source.SLM, Source.CHAIN))
    assert subtree(TREE, 5) == (EMPTY_TREE, ())


@given(parents_of_any_tree(), st.data())
def test_a_subtree_keeps_order_and_ancestry(parents: list[int], data: st.DataObject) -> None:
    if not parents:
        return
    tree = Tree(tuple(range(len(parents))), tuple(parents), (0.0,) * len(parents), (Source.SLM,) * len(parents))
    root = data.draw(st.integers(0, len(parents) - 1))
    found, rows = subtree(tree, root)
    below = [row for row in range(len(parents)) if row != root and root in path_to(parents, row)]
    assert list(rows) == below and list(found.tokens) == below
    for row, parent in zip(rows, found.parents, strict=True):
        assert parents[row] == (root if parent == ROOT else rows[parent])
