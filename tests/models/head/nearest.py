"""A head's weights in the cheapest stored form: rounded to nearest, no search."""

from collections.abc import Mapping

import torch

from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.models import weight_rounding


def nearest_matrices(weights: Mapping[str, torch.Tensor], bits: int) -> dict[str, IntegerMatrix]:
    """Weights rounded to nearest, by name."""
    return {
        name: weight_rounding.integer_matrix(weight, weight_rounding.nearest_scales(weight, bits), bits)
        for name, weight in weights.items()
    }
