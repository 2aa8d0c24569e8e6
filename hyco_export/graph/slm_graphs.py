"""The SLM's two QDQ graphs: tree pass and prefill pass; their weights read back, inner tensors as outputs to measure.

Network and encodings come from `core.network`; `graph.lint` checks the result.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

from hyco_export.core.device_spec import SLM_PREFILL_GRAPH, SLM_TREE_GRAPH, GraphSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.network import slm
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import Weights
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.graph.writer import ExternalData, raw_bytes, read_weight


def tree_graph(
    network: SlmNetwork,
    weights: Weights,
    encodings: Mapping[str, Encoding],
    rows: int,
    data: ExternalData | None = None,
) -> tuple[onnx.ModelProto, GraphSpec]:
    """One pass over R rows of a forest: new K/V rows and logits; large weights go to `data`."""
    ops = QdqOps(SLM_TREE_GRAPH, weights, encodings, data)
    slm.build(ops, network, rows)
    return ops.model(), ops.spec()


def prefill_graph(
    network: SlmNetwork,
    weights: Weights,
    encodings: Mapping[str, Encoding],
    rows: int,
    data: ExternalData | None = None,
) -> tuple[onnx.ModelProto, GraphSpec]:
    """One pass over R consecutive tokens: new K/V rows; large weights go to `data`, or are found there."""
    ops = QdqOps(SLM_PREFILL_GRAPH, weights, encodings, data)
    slm.build_prefill(ops, network, rows)
    return ops.model(), ops.spec()


def with_outputs(model: onnx.ModelProto, tensors: Iterable[TensorSpec]) -> onnx.ModelProto:
    """A copy with these inner integer tensors as further outputs."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    for spec in tensors:
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        opened.graph.output.append(onnx.helper.make_tensor_value_info(spec.name, kind, spec.shape))
    return opened


class StoredMatrices(Mapping[str, tuple[np.ndarray, np.ndarray]]):
    """Linear weights of a graph: integers int8 [N, K] and scales float32 [N] by name, read on demand.

    Args:
        model: a graph of `tree_graph` or `prefill_graph`.
        folder: where its external data lies, if it has some.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path | None = None) -> None:
        self._folder = folder
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._tensors = {}
        for node in model.graph.node:
            if node.op_type == "DequantizeLinear" and node.input[0] in constants:
                integers, scales = (constants[name] for name in node.input[:2])
                if len(integers.dims) == 2 and len(scales.dims) == 1:  # one scale per output channel: a linear layer
                    self._tensors[integers.name] = integers, scales

    def __getitem__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        integers, scales = self._tensors[name]
        return read_weight(integers, self._folder), raw_bytes(scales, self._folder).view(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
