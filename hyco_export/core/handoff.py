"""The hand-off: what the server returns so that the device can run the head, in 8-bit integers.

Per round e(root) and h, [H] each; per committed token one K and one V row of the verifier's last sliding and last full
layer that store K/V (HyCo, §3.1 and Appendix A). Sizes, encodings and the byte layout on the wire.
"""

from typing import Literal

import msgspec
import numpy as np

from hyco_export.core.encodings import Encoding

LayerType = Literal["sliding", "full"]
LAYER_TYPES: tuple[LayerType, ...] = ("sliding", "full")
HiddenNorm = Literal["pre", "post"]


class KvShape(msgspec.Struct, frozen=True):
    """K/V of one layer type: `heads` x `dim` values for K and as many for V."""

    heads: int
    dim: int

    @property
    def values(self) -> int:
        return self.heads * self.dim


class KvRows(msgspec.Struct, frozen=True):
    """Consecutive K/V rows in the head artifact's encodings: uint8 [n, heads, dim] by layer type."""

    k: dict[str, np.ndarray]
    v: dict[str, np.ndarray]

    @property
    def count(self) -> int:
        return len(next(iter(self.k.values())))


class HandoffSpec(msgspec.Struct, frozen=True):
    """Sizes and encodings of a hand-off. `encodings` has keys e, h, k.sliding, v.sliding, k.full, v.full (uint8)."""

    hidden: int  # H, the verifier's hidden size
    window: int  # positions of K/V the head keeps (1,024 in the paper)
    hidden_norm: HiddenNorm  # h from before or after the verifier's final norm
    kv: dict[str, KvShape]  # by layer type
    encodings: dict[str, Encoding]

    @property
    def round_bytes(self) -> int:
        """Bytes of e(root) and h: 5,632 for Gemma 4 26B-A4B."""
        return 2 * self.hidden

    @property
    def row_bytes(self) -> int:
        """Bytes of the K/V of one committed token: 6,144 for Gemma 4 26B-A4B."""
        return sum(2 * self.kv[layer_type].values for layer_type in LAYER_TYPES)

    def pack_rows(self, rows: KvRows) -> bytes:
        """Row-major bytes: for each row K then V of the sliding layer, then of the full layer."""
        parts = [part[t].reshape(rows.count, -1) for t in LAYER_TYPES for part in (rows.k, rows.v)]
        return np.concatenate(parts, axis=1).tobytes()

    def unpack_rows(self, payload: bytes) -> KvRows:
        """Inverse of `pack_rows`.

        Raises:
            ValueError: the payload is not a whole number of rows.
        """
        if len(payload) % self.row_bytes:
            raise ValueError(f"{len(payload)} B of K/V is not a multiple of {self.row_bytes} B per token")
        table = np.frombuffer(payload, np.uint8).reshape(-1, self.row_bytes)
        k: dict[str, np.ndarray] = {}
        v: dict[str, np.ndarray] = {}
        start = 0
        for layer_type in LAYER_TYPES:
            shape = self.kv[layer_type]
            for store in (k, v):
                block = table[:, start : start + shape.values]
                store[layer_type] = block.reshape(len(table), shape.heads, shape.dim)
                start += shape.values
        return KvRows(k, v)
