"""Seeded heads of any size in the stored form, made without a checkpoint: distinct random integers, hand-offs, grids.

Random integers do not compress and no two tensors are alike, so that sizes of binaries are those of a real head. Knows
the stored form and the static network; neither torch modules nor transformers.

Legend: T positions of a recorded sequence, H the verifier's hidden size, C kept rows.
"""

from dataclasses import dataclass

import numpy as np

from hyco_export.core.device_spec import to_integers
from hyco_export.core.encodings import Encoding, symmetric_limits
from hyco_export.core.handoff import LAYER_TYPES, KvShape
from hyco_export.core.network.head import HeadArchitecture, HeadLayer, HeadNetwork
from hyco_export.core.network.host import draft_feeds, on_grid
from hyco_export.core.network.quantisation import handoff_encodings, head_encodings
from hyco_export.core.network.weight_files import StoredHead
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, Weights
from hyco_export.core.ring import slot_positions
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.models.head.static_pass import FloatHead
from hyco_export.models.torch_ops import RangeObserver

BITS = 4
MASK_VALUE = -100.0
SCORE_STD = 1.5  # of attention: with queries of full length random weights attend to one key and amplify all rounding


@dataclass(frozen=True)
class HeadSizes:
    """What a head's size depends on; `layers` by letters: S sliding, F full."""

    backbone: int
    width: int
    intermediate: int
    heads: int
    layers: str
    sliding: KvShape
    full: KvShape
    kept: int
    window: int

    def architecture(self) -> HeadArchitecture:
        kv = {"sliding": self.sliding, "full": self.full}
        types = {"S": "sliding", "F": "full"}
        return HeadArchitecture(
            backbone=self.backbone,
            width=self.width,
            vocab_size=self.kept,
            epsilon=1e-6,
            layers=tuple(HeadLayer(types[letter], self.heads, kv[types[letter]], 1.0) for letter in self.layers),
            spans={"sliding": self.window // 2, "full": None},
            inv_freq={name: tuple(1e4 ** (-np.arange(0, kv[name].dim, 2) / kv[name].dim)) for name in LAYER_TYPES},
        )


FULL_SIZE = HeadSizes(2816, 1024, 8192, 16, "SSSF", KvShape(8, 256), KvShape(2, 512), 86_089, 1024)
"""The assistant of Gemma 4 26B-A4B over the paper's keep set."""
SMALL = HeadSizes(48, 32, 96, 4, "SSSF", KvShape(2, 8), KvShape(1, 16), 90, 16)


def random_head(sizes: HeadSizes, seed: int = 0) -> StoredHead:
    """Random integers with scales that keep the variance, norms around 1."""
    rng = np.random.default_rng(seed)
    matrices = {name: _matrix(rng, *shape) for name, shape in _matrix_shapes(sizes).items()}
    vectors = {name: _norm(rng, name, length) for name, length in _vector_lengths(sizes).items()}
    return StoredHead(sizes.architecture(), BITS, matrices, vectors)


def random_table(sizes: HeadSizes, seed: int = 1) -> IntegerTable:
    """8-bit rows of unit variance."""
    rng = np.random.default_rng(seed)
    integers = rng.integers(1, 256, (sizes.kept, sizes.backbone), dtype=np.uint8)
    return IntegerTable(integers, rng.uniform(0.012, 0.016, sizes.kept).astype(np.float32))


def random_handoff(sizes: HeadSizes, length: int, seed: int = 2) -> dict[str, np.ndarray]:
    """A recorded sequence: e, h [T, H]; k.<type>, v.<type> [T, N, d]."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"e": (sizes.backbone,), "h": (sizes.backbone,)}
    for layer_type, kv in (("sliding", sizes.sliding), ("full", sizes.full)):
        shapes |= {f"{kind}.{layer_type}": (kv.heads, kv.dim) for kind in ("k", "v")}
    return {name: rng.standard_normal((length, *shape), dtype=np.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class HeadParts:
    """A head ready to be written as a graph, and integer feeds of some roots."""

    network: HeadNetwork
    weights: Weights
    encodings: dict[str, Encoding]
    real_feeds: list[dict[str, np.ndarray]]
    float_head: FloatHead

    def feeds(self, ops: QdqOps) -> list[dict[str, np.ndarray]]:
        return [to_integers(ops.spec().inputs, feeds) for feeds in self.real_feeds]


def calibrate(network: HeadNetwork, weights: Weights, sizes: HeadSizes, roots: int) -> HeadParts:
    """Ranges over `roots` drafts on a random sequence that wraps the ring."""
    recorded = random_handoff(sizes, sizes.window + sizes.window // 4 + roots)
    grids = handoff_encodings({name: (float(v.min()), float(v.max())) for name, v in recorded.items()})
    recorded = on_grid(recorded, grids)
    length = len(recorded["e"])
    feeds = [
        draft_feeds(network, recorded, np.array([root]), slot_positions(root, sizes.window), MASK_VALUE)
        for root in range(length - roots, length)
    ]
    float_head = FloatHead(network, weights)
    observer = RangeObserver(100.0, roots)
    for feed in feeds:
        float_head.draft(feed, observer)
    encodings = head_encodings(network, observer.ranges(), grids, MASK_VALUE)
    return HeadParts(network, weights, encodings, feeds, float_head)


def _matrix_shapes(sizes: HeadSizes) -> dict[str, tuple[int, int]]:
    shapes = {
        "pre_projection": (sizes.width, 2 * sizes.backbone),
        "post_projection": (sizes.backbone, sizes.width),
        "lm_head": (sizes.kept, sizes.width),
    }
    for index, layer in enumerate(sizes.architecture().layers):
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        inner = layer.heads * layer.kv.dim
        shapes |= {f"{attention}.q_proj": (inner, sizes.width), f"{attention}.o_proj": (sizes.width, inner)}
        shapes |= {f"{mlp}.{name}_proj": (sizes.intermediate, sizes.width) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj"] = (sizes.width, sizes.intermediate)
    return shapes


def _vector_lengths(sizes: HeadSizes) -> dict[str, int]:
    lengths = {"norm": sizes.width}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for index, layer in enumerate(sizes.architecture().layers):
        lengths |= {f"layers.{index}.{norm}_layernorm": sizes.width for norm in norms}
        lengths[f"layers.{index}.self_attn.q_norm"] = layer.kv.dim
    return lengths


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> IntegerMatrix:
    _, high = symmetric_limits(BITS)
    # as many above 0 as below: a mean of -0.5 would multiply every common error of an activation, and no head has one
    integers = rng.integers(-high, high + 1, (rows, columns), dtype=np.int8)
    unit = 1.0 / (np.sqrt(high * (high + 1) / 3) * columns**0.5)  # variance of uniform integers
    return IntegerMatrix(integers, (unit * rng.uniform(0.5, 1.5, rows)).astype(np.float32), BITS)


def _norm(rng: np.random.Generator, name: str, length: int) -> np.ndarray:
    weight = rng.uniform(0.5, 1.5, length).astype(np.float32)
    return weight * np.float32(SCORE_STD / length**0.5) if name.endswith("q_norm") else weight
