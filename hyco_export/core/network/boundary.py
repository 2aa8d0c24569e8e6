"""Between real values and a graph's integers: every input and output by its own encoding. Values only."""

from collections.abc import Iterable, Mapping

import numpy as np

from hyco_export.core.graphspec import TensorSpec

Values = Mapping[str, np.ndarray]


def to_integers(tensors: Iterable[TensorSpec], real: Values) -> dict[str, np.ndarray]:
    """Integers of `tensors` (a graph's inputs or outputs); what `real` has beyond them is left out."""
    return {
        spec.name: spec.encoding.quantize(real[spec.name]) if spec.encoding else real[spec.name].astype(spec.dtype)
        for spec in tensors
    }


def to_real(tensors: Iterable[TensorSpec], integers: Values) -> dict[str, np.ndarray]:
    """Real values of `tensors`, float32; plain integers stay."""
    return {
        spec.name: spec.encoding.dequantize(integers[spec.name]) if spec.encoding else integers[spec.name]
        for spec in tensors
    }
