"""A recipe's precisions as torch's."""

import torch

from hyco_export.core.recipe import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
