"""Tensors of a file, and their values in parts."""

from pathlib import Path

import numpy as np

from hyco_export.workbench.facts import chunks
from hyco_export.workbench.files import read_file


def test_values_of_every_stored_type_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {str(dtype): torch.tensor([1, 2, 3]).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.float16)}
    save_torch(tensors, tmp_path / "t.safetensors")
    facts = read_file(tmp_path / "t.safetensors")
    assert len(facts.stored) == 3
    for tensor in facts.tensors:
        np.testing.assert_array_equal(np.concatenate(list(chunks(facts.stored[tensor.name], tensor.dtype))), [1, 2, 3])
