"""Hand-off values in the head artifact's 8-bit grids, made where the values are; the bytes are core.handoff's.

Legend: n rows, N K/V heads, d head dimension, H hidden.
"""

from collections.abc import Mapping

import torch

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, LayerType
from hyco_export.runtime.wire import Handoff

UINT8_MAX = 255


class HandoffEncoder:
    """Encodes for one head artifact."""

    def __init__(self, spec: HandoffSpec) -> None:
        self.spec = spec

    def encode(
        self,
        e: torch.Tensor,
        h: torch.Tensor,
        rows: Mapping[LayerType, tuple[torch.Tensor, torch.Tensor]],
        first_position: int,
    ) -> Handoff:
        """e, h [H] and (K, V) [N, n, d] by layer type, of positions first_position ... -> the hand-off."""
        grids = self.spec.encodings
        blocks = [
            quantize(part, grids[f"{name}.{layer_type}"]).transpose(0, 1).flatten(1)  # [n, N * d]
            for layer_type in LAYER_TYPES
            for name, part in zip("kv", rows[layer_type], strict=True)
        ]
        return Handoff(
            e=_bytes(quantize(e, grids["e"])),
            h=_bytes(quantize(h, grids["h"])),
            kv=_bytes(torch.cat([block.to(blocks[0].device) for block in blocks], dim=1)),
            first_position=first_position,
        )


def quantize(real: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """`Encoding.quantize` of a uint8 grid, bit for bit, where the tensor is: [...] -> uint8 [...]."""
    levels = torch.round(real.double() / encoding.scale) + encoding.zero_point
    return levels.clamp_(0, UINT8_MAX).to(torch.uint8)


def _bytes(integers: torch.Tensor) -> bytes:
    return integers.contiguous().cpu().numpy().tobytes()
