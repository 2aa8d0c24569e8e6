"""Drafts are compared with the original head only where both were fed the same tokens."""

from functools import partial

import numpy as np

from hyco_export.models.head.agreement import ComparedPosition, DepthShare, Drafts, match_original, run_session
from hyco_export.stages.convert_head import remarks

KEPT = np.array([10, 20, 30, 40])


def position(following, original):
    return ComparedPosition(dict, following, original)


def test_depths_count_while_the_chain_equals_the_sequence():
    drafts = Drafts(np.array([[0, 1, 2], [0, 1, 2], [3, 0, 0]]), np.zeros((3, 0), np.int32))
    positions = [
        position((10, 20, 99), (10, 20, 30)),  # follows the sequence to the end
        position((10, 77, 30), (10, 21, 30)),  # leaves it at depth 2, where the original differs too
        position((50,), (40,)),  # the last position of a sequence
    ]
    assert match_original(drafts, positions, KEPT) == [DepthShare(1.0, 3), DepthShare(0.5, 2), DepthShare(1.0, 1)]


def test_depths_nobody_reached_are_empty():
    drafts = Drafts(np.array([[0, 0]]), np.zeros((1, 0), np.int32))
    assert match_original(drafts, [position((99, 99), (10, 10))], KEPT) == [DepthShare(1.0, 1), DepthShare(0.0, 0)]


class Scripted:
    """A session that drafts the token it is fed."""

    def run(self, feeds):
        return {"chain": np.array([feeds["e"], feeds["e"]])}

    def close(self):
        pass


def test_sessions_without_runner_ups_are_stacked_too():
    drafts = run_session(Scripted(), [ComparedPosition(partial(dict, e=row), (), ()) for row in (1, 2, 3)])
    assert drafts.chain.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert drafts.runner_up.shape == (3, 0)


def test_a_head_that_drafts_one_token_everywhere_is_said():
    none = np.zeros((3, 0), np.int32)
    one, several = Drafts(np.full((3, 2), 2), none), Drafts(np.array([[2, 2], [2, 2], [2, 1]]), none)
    assert remarks(several, several, KEPT) == []
    (line,) = remarks(several, one, KEPT)
    assert line.startswith("the head's graph drafts token 30 at all 3 validation positions")
    assert len(remarks(one, one, KEPT)) == 2
