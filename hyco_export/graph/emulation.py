"""How much of a compiled graph the x86 emulator can afford to prove. Knows its speed by weights and rows only."""

from math import ceil, prod

import onnx

from hyco_export.graph.index import GraphIndex

TILE_ROWS = 32  # rows that cost what one row costs
WEIGHTS_PER_S = 8_000_000  # 7-11 million on two cores
BUDGET_S = 120  # for the feeds of one graph, one feed at least: a draft of a full-size head takes this long


def affordable_feeds(model: onnx.ModelProto, most: int) -> int:
    """Feeds of this graph that fit the budget: at least one, at most `most` (0 stays 0)."""
    feeds = BUDGET_S * WEIGHTS_PER_S // max(1, linear_work(model))
    return min(most, max(1, feeds))


def linear_work(model: onnx.ModelProto) -> int:
    """Weights that one run reads: those of every linear layer, once for each tile of its rows and each time it runs."""
    index = GraphIndex(model)
    work = 0
    for node in index.nodes:
        weight = index.stored(node.input[1]) if node.op_type == "Gemm" else None
        shape = index.shape(node.output[0])  # [R, N]
        if weight is not None and weight in index.constants and shape is not None:
            work += prod(index.constants[weight].dims) * ceil((shape[0] or 1) / TILE_ROWS)
    return work
