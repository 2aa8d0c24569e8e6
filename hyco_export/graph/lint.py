"""Refuses QDQ graphs that the NPU compiler would accept and compute wrongly, or split between NPU and CPU.

One row of `RULES` is one rule: its name, its check, and what happens when it is broken. The consequences were seen with
onnxruntime-qnn 2.7 in the HTP emulator. The checks are in `graph.lint_structure` (types, layout) and
`graph.lint_numerics` (widths, quantisation parameters, operators).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from hyco_export.errors import CompileError
from hyco_export.graph import lint_numerics as numerics
from hyco_export.graph import lint_structure as structure
from hyco_export.graph.index import GraphIndex
from hyco_export.graph.lint_structure import Breach

SHOWN_FINDINGS = 5


class Rule(NamedTuple):
    """One rule."""

    name: str
    check: Callable[[onnx.ModelProto, GraphIndex], Iterator[Breach]]
    consequence: str


class Finding(msgspec.Struct, frozen=True):
    """One broken rule at one place."""

    rule: str
    where: str  # node or tensor
    message: str  # what is there, then what it leads to


RULES = (
    Rule("opset", structure.opset, "the provider was proved on opset 21 with IR 10 and opset 23 with IR 11 only"),
    Rule("fixed-shape", structure.fixed_shape, "an NPU graph is static"),
    Rule(
        "integer-io", structure.integer_io, "the host exchanges integers; a float tensor adds operators or falls back"
    ),
    Rule("float-island", structure.float_island, "the compiler accepts it and computes this part in half precision"),
    Rule("trailing-dequantize", structure.trailing_dequantize, "it adds an operator and gives a float: end at Q"),
    Rule("index-range", numerics.index_range, "indices come back modulo 65,536: split the axis"),
    Rule("topk", numerics.topk, "values pass through half precision and near-ties flip: ArgMax twice, or the host"),
    Rule("gelu", numerics.gelu, "72 dB: decompose the tanh form (93 dB)"),
    Rule("decomposed-norm", numerics.decomposed_norm, "quiet rows drown (2.5 dB): use RMSNormalization"),
    Rule("norm-scale", numerics.norm_scale, "71 dB: store the scale on a 16-bit grid (83 dB)"),
    Rule("softmax-mask", numerics.softmax_mask, "a 16-bit grid loses its resolution, or hidden positions stay visible"),
    Rule("wide-matmul", numerics.wide_matmul, "41 dB: store K and V as 8 bits"),
    Rule("matmul-offset", numerics.matmul_offset, "48-57 dB instead of 84: its far end is clipped; centre the grid"),
    Rule("int2", numerics.int2, "it compiles and gives noise: carry 2-bit integers in INT4"),
    Rule("uint4", numerics.uint4, "it falls back or gives noise: use symmetric INT4"),
    Rule("int4-zero-point", numerics.int4_zero_point, "it falls back, or gives noise when none is stored: store zeros"),
    Rule("int4-table", numerics.int4_table, "lookups fall back to the CPU: use a uint8 table"),
    Rule("channel-axis", numerics.channel_axis, "code 1002 or silently 11 dB: scales belong to the output channel"),
    Rule(
        "block-scales",
        numerics.block_scales,
        "it falls back or computes in half precision (68 dB): multiples of channel scales before a 16-bit MatMul",
    ),
)


def lint(model: onnx.ModelProto, folder: Path | None = None) -> list[Finding]:
    """Every broken rule of a QDQ graph, in table order; empty for a clean one.

    Args:
        model: weights need not be loaded.
        folder: where its external data lies, if it has some that is not loaded.
    """
    index = GraphIndex(model, folder)
    return [
        Finding(rule.name, breach.where, f"{breach.what}; {rule.consequence}")
        for rule in RULES
        for breach in rule.check(model, index)
    ]


def require_clean(model: onnx.ModelProto, name: str, folder: Path | None = None) -> None:
    """Check that a graph breaks no rule; `name` is what the message calls it, `folder` as in `lint`.

    Raises:
        CompileError: lists the first findings.
    """
    findings = lint(model, folder)
    if findings:
        shown = " | ".join(f"{f.rule} at {f.where}: {f.message}" for f in findings[:SHOWN_FINDINGS])
        more = f" | and {len(findings) - SHOWN_FINDINGS} more" if len(findings) > SHOWN_FINDINGS else ""
        raise CompileError(f"{name} breaks {len(findings)} rule(s) of the NPU: {shown}{more}", "change the graph")
