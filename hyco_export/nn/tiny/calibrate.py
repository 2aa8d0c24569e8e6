"""Static ranges of the packed SLM: its key/value cache and the activations around its linears.

Legend: B rows, T tokens.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache, Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row, ordered_batches, padded_ids

INT8_MAX = 127

RANGE_QUANTILE = 0.999
RANGE_MARGIN = 1.2
"""The range is 1.2 x the 99.9th percentile of the magnitudes: the rule of the paper's conversion for the K/V cache."""


@torch.no_grad()
def cache_scales(slm: Gemma4ForCausalLM, rows: Sequence[Row]) -> dict[str, float]:
    """8-bit scales of what each storing layer writes into its cache, by checkpoint name."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    for batch in ordered_batches(rows):
        cache = DynamicCache()
        slm.model(input_ids=padded_ids(batch), cache=cache, use_cache=True)
        for index, (keys, values, *_) in enumerate(cache):
            seen[f"model.layers.{index}.self_attn.k_cache_scale"].append(_percentile(keys))
            seen[f"model.layers.{index}.self_attn.v_cache_scale"].append(_percentile(values))
    return {name: _scale(percentiles) for name, percentiles in seen.items()}


@torch.no_grad()
def activation_scales(slm: Gemma4ForCausalLM, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """8-bit (input, output) scales of every linear, by module name."""
    inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, before: tuple[torch.Tensor, ...], after: torch.Tensor) -> None:
            inputs[name].append(_percentile(before[0]))
            outputs[name].append(_percentile(after))

        return module.register_forward_hook(keep)

    handles = [watch(name, module) for name, module in slm.named_modules() if isinstance(module, nn.Linear)]
    for batch in ordered_batches(rows):
        slm(input_ids=padded_ids(batch), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: (_scale(inputs[name]), _scale(outputs[name])) for name in inputs}


def _percentile(values: torch.Tensor) -> torch.Tensor:
    """The magnitude at RANGE_QUANTILE of one batch's values."""
    magnitudes = values.abs().flatten()
    return magnitudes.kthvalue(max(1, int(RANGE_QUANTILE * len(magnitudes)))).values


def _scale(percentiles: Sequence[torch.Tensor]) -> float:
    """The largest batch's percentile, with its margin, over the largest 8-bit integer."""
    return RANGE_MARGIN * float(torch.stack(list(percentiles)).max()) / INT8_MAX
