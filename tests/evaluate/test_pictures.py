"""The rounds a reader is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.evaluate.pictures import label, layout, median_times, pick_tree
from hyco_export.protocol.tree import ROOT, depths
from tests.evaluate.synthetic_traces import generation, round_trace


def test_medians_split_a_round_into_its_phases():
    rounds = [
        round_trace((), head_ms=1.0, slm_ms=2.0, draft_ms=4.0, wait_ms=6.0, server_ms=ms) for ms in (1.0, 2.0, 5.0)
    ]
    times = median_times("hyco", [generation(*rounds)])
    assert times.phases == {"head": 1.0, "slm": 2.0, "scoring": 1.0, "transfer": 4.0, "server": 2.0, "commit": 0.5}


def test_a_clock_that_disagrees_gives_no_negative_time():
    times = median_times("hyco", [generation(round_trace((), wait_ms=2.0, server_ms=3.0, draft_ms=2.9))])
    assert (times.transfer_ms, times.scoring_ms) == (0.0, 0.0)


def test_the_round_with_most_kinds_of_drafters_is_drawn():
    rounds = (round_trace((0, 1, 2)), round_trace((0, 4), number=2), round_trace((0, 4), number=3))
    tree = pick_tree([generation(*rounds)], lambda token: f"t{token}")
    assert (tree.round, tree.accepted, tree.bonus) == (2, (0, 4), "t99")
    assert tree.labels[:2] == ("t10", "t11")
    assert tree.root == "t1"  # the token PRIME drew


def test_rounds_that_ended_an_answer_or_sent_no_tree_are_not_drawn():
    ended = round_trace((0,), tokens=(10,), finished="stop")
    assert pick_tree([generation(round_trace((0,), drafted=4), ended)], str) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n", "⏎"),
        ("", "∅"),
        ("\x07a", "�a"),
        ("a_very_long_token", "a_very_long…"),
        ("exactly_12ch", "exactly_12ch"),
    ],
)
def test_labels_show_what_cannot_be_seen(text, shown):
    assert label(text) == shown


# Places of nodes: right depth, no overlaps, no crossings.


@st.composite
def parent_lists(draw):
    count = draw(st.integers(0, 40))
    return [draw(st.integers(ROOT, node - 1)) for node in range(count)]


@given(parent_lists())
def test_columns_are_depths_and_no_two_nodes_share_a_place(parents):
    columns, rows = layout(parents, [0] * len(parents))
    assert [columns[node] for node in range(len(parents))] == depths(parents).tolist()
    assert len({(columns[node], rows[node]) for node in columns}) == len(parents) + 1


@given(parent_lists())
def test_edges_do_not_cross(parents):
    columns, rows = layout(parents, [0] * len(parents))
    for a, parent_a in enumerate(parents):
        for b, parent_b in enumerate(parents[:a]):
            if columns[a] == columns[b] and parent_a != parent_b:
                assert (rows[a] < rows[b]) == (rows[parent_a] < rows[parent_b])


def test_the_best_ranked_branch_is_a_straight_line():
    #          0 slm  1 chain  2 chain under 1  3 slm under 1
    columns, rows = layout([ROOT, ROOT, 1, 1], [2, 0, 0, 2])
    assert (rows[1], rows[2]) == (0, 0)
    assert (rows[0], rows[3]) == (1, 1)
    assert columns[2] == 2
