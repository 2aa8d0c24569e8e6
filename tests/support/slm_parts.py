"""A small converted SLM in memory: network, weights, tables, calibrated grids and both graphs."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.files import locate
from hyco_export.core.network.quantisation import slm_encodings
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import Weights
from hyco_export.core.tables import TABLES_FILE, HostTables, save_tables
from hyco_export.graph.slm_graphs import prefill_graph, tree_graph
from hyco_export.models.slm.calibration import calibrated_ranges
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.slm.surgery import host_tables, slm_network, slm_weights
from hyco_export.models.torch_ops import TorchWeights
from tests.support.packed_slm import RINGS, ROWS, plain_config, random_ids, save_packed_slm, slm_config

KEPT = np.arange(0, 96, 3)
MASK_VALUE = -100.0


@dataclass(frozen=True)
class SlmParts:
    """Everything between a checkpoint and its graphs."""

    home: TemporaryDirectory[str]  # of the checkpoint and the tables; goes with this object
    network: SlmNetwork
    weights: Weights
    tables: HostTables
    float_slm: FloatSlm
    encodings: dict[str, Encoding]
    tree_model: onnx.ModelProto
    tree: GraphSpec
    prefill_model: onnx.ModelProto
    prefill: GraphSpec


@lru_cache
def slm_parts(kind: str = "like-e2b") -> SlmParts:
    """`like-e2b` or `values-from-keys`."""
    config = slm_config() if kind == "like-e2b" else plain_config()
    home = TemporaryDirectory(prefix="slm-")
    sequences = [random_ids(40, seed) for seed in range(4)]
    return _convert(save_packed_slm(Path(home.name), config), home, KEPT, RINGS, ROWS, sequences)


@lru_cache
def embedded_slm_parts() -> SlmParts:
    """The SLM of the embedded family, calibrated on some random tokens."""
    home = TemporaryDirectory(prefix="slm-")
    folder = locate("embedded:slm", None)
    assert folder is not None
    kept = np.arange(PackedCheckpoint(folder).config.vocab_size // 2)
    rng = np.random.default_rng(0)
    sequences = [rng.choice(kept, 64).tolist() for _ in range(2)]
    return _convert(folder, home, kept, {"sliding": 64, "full": 128}, 32, sequences)


def _convert(
    folder: Path,
    home: TemporaryDirectory[str],
    kept: np.ndarray,
    rings: dict[str, int],
    rows: int,
    sequences: list[list[int]],
) -> SlmParts:
    checkpoint = PackedCheckpoint(folder)
    network = slm_network(checkpoint, rings)
    weights = slm_weights(checkpoint, kept)
    path = Path(home.name) / TABLES_FILE
    save_tables(path, host_tables(checkpoint))
    tables = HostTables(path)
    slm = FloatSlm(network, TorchWeights(weights))
    ranges = calibrated_ranges(
        slm, tables, sequences, rows, MASK_VALUE, percentile=100.0, kv_percentile=99.9, tell=lambda done, total: None
    )
    encodings = slm_encodings(network, ranges, margin=1.2, kv_margin=1.2, mask_value=MASK_VALUE)
    tree_model, tree = tree_graph(network, weights, encodings, rows)
    prefill_model, prefill = prefill_graph(network, weights, encodings, rows)
    return SlmParts(home, network, weights, tables, slm, encodings, tree_model, tree, prefill_model, prefill)
