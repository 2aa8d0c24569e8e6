"""Where the nodes of a drawn tree stand: a column by depth, a row as high as possible. Pure; knows no colours.

Branches are placed depth first and every column is filled from the top, so no two edges cross, and the first branch
(the chain) is a straight line.
"""

from collections import Counter
from collections.abc import Sequence

from hyco_export.runtime.tree import ROOT


def layout(parents: Sequence[int], ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Columns and rows by node, ROOT included; siblings stand in the order of (rank, node)."""
    children: dict[int, list[int]] = {node: [] for node in (ROOT, *range(len(parents)))}
    for node, parent in enumerate(parents):
        children[parent].append(node)
    columns, rows = {ROOT: 0}, {ROOT: 0}
    free: Counter[int] = Counter()  # first free row by column
    stack = _last_first(children[ROOT], ranks)
    while stack:
        node = stack.pop()
        column = columns[parents[node]] + 1
        columns[node], rows[node] = column, max(free[column], rows[parents[node]])
        free[column] = rows[node] + 1
        stack.extend(_last_first(children[node], ranks))
    return columns, rows


def _last_first(nodes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (ranks[node], node), reverse=True)
