"""Places of nodes: right depth, no overlaps, no crossings."""

from hypothesis import given
from hypothesis import strategies as st

from hyco_export.evaluate.pictures import layout
from hyco_export.protocol.tree import ROOT, depths


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
