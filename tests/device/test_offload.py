"""Offload policies by themselves: what each keeps of a tree."""

import math

import pytest

from hyco_export.core.recipe import Synera
from hyco_export.device.offload import AskForAll, AskForNone, KeepConfident, best_line
from hyco_export.protocol.tree import ROOT, Source, Tree, subtree


def chain(*confidence: float) -> Tree:
    scores, total = [], 0.0
    for q in confidence:
        total += math.log(q)
        scores.append(total)
    count = len(confidence)
    return Tree(tuple(range(2, 2 + count)), tuple(range(ROOT, count - 1)), tuple(scores), (Source.SLM,) * count)


BUSHY = Tree((5, 6, 7, 8, 9), (ROOT, ROOT, 1, 1, 3), (-1.0, -0.5, -0.9, -0.7, -2.0), (Source.SLM,) * 5)


def test_who_asks_and_who_keeps() -> None:
    assert [(p.asks, p.keeps) for p in (AskForAll(), KeepConfident(Synera(0.5, unverified=3)), AskForNone())] == [
        (True, False), (True, True), (False, True),
    ]  # fmt: skip
    assert AskForAll().keep(chain(0.9, 0.9), 0) == ()
    assert AskForNone().keep(chain(0.9, 0.1), 7) == (0, 1)


@pytest.mark.parametrize(
    ("confidence", "unsent", "kept"),
    [
        ((0.9, 0.8, 0.3, 0.9), 0, (0, 1)),  # nothing behind an unsure token
        ((0.3, 0.9), 0, ()),
        ((0.9, 0.9, 0.9), 0, (0, 1, 2)),
        ((0.9, 0.9, 0.9), 3, (0,)),  # four in a row at most
        ((0.9, 0.9), 4, ()),
        ((0.9, 0.9), 9, ()),
        ((), 0, ()),
    ],
)
def test_confident_tokens_stay_up_to_the_first_unsure_one(
    confidence: tuple[float, ...], unsent: int, kept: tuple[int, ...]
) -> None:
    assert KeepConfident(Synera(0.5, unverified=4)).keep(chain(*confidence), unsent) == kept


def test_the_threshold_itself_is_confident_enough() -> None:
    assert KeepConfident(Synera(0.5, unverified=4)).keep(chain(0.5), 0) == (0,)


def test_the_best_line_follows_the_best_child_at_every_node() -> None:
    assert best_line(BUSHY) == (1, 3, 4)
    assert best_line(Tree((), ())) == ()


def test_a_subtree_keeps_order_scores_and_the_way_back() -> None:
    below, rows = subtree(BUSHY, 1)
    assert rows == (2, 3, 4)
    assert below == Tree((7, 8, 9), (ROOT, ROOT, 1), pytest.approx((-0.4, -0.2, -1.5)), (Source.SLM,) * 3)
    assert subtree(BUSHY, 0) == (Tree((), (), (), ()), ())
