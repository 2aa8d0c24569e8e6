"""A quantised head on disk: one safetensors file with integers, scales, norms and the head's shape.

`<layer>.integers` int8 [N, K] (4-bit values one per byte) and `<layer>.scales` float32 [N] for every linear layer,
`<layer>.multipliers` uint8 [N, J] where it has blocks of inputs, `<norm>` float32 [n] for every norm; metadata `head`:
JSON of `Description`. The output layer still has all rows of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hyco_export.core.network.head import FINAL_NORM, OUTPUT_LAYER, TABLE, HeadArchitecture
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, Weights
from hyco_export.errors import ArtifactError

HEAD_FILE = "head.safetensors"
INTEGERS, SCALES, MULTIPLIERS = ".integers", ".scales", ".multipliers"
METADATA = "head"  # one key: safetensors keeps no order of several, and equal heads must be equal files


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the file says of itself. `overrides`: width of the layers whose integers do not have `bits`."""

    bits: int
    architecture: HeadArchitecture
    overrides: dict[str, int] = {}


@dataclass(frozen=True)
class StoredHead:
    """Linear layers and norms by the names that `core.network.head` uses."""

    architecture: HeadArchitecture
    bits: int
    matrices: Mapping[str, IntegerMatrix]
    vectors: Mapping[str, np.ndarray]

    def device_weights(self, kept: np.ndarray, table: IntegerTable, final_norm: np.ndarray | None) -> Weights:
        """What the graph reads: the output layer has the rows of the token ids `kept` [C] only.

        `final_norm` [H] is the verifier's, for a head that is handed h from before it.
        """
        restricted = self.matrices[OUTPUT_LAYER].rows(kept)
        vectors = dict(self.vectors) if final_norm is None else {**self.vectors, FINAL_NORM: final_norm}
        return Weights({**self.matrices, OUTPUT_LAYER: restricted}, vectors, {TABLE: table})


def write_head(path: Path, head: StoredHead) -> None:
    """Write the file."""
    tensors: dict[str, np.ndarray] = dict(head.vectors)
    for name, matrix in head.matrices.items():
        tensors[name + INTEGERS] = matrix.integers
        tensors[name + SCALES] = matrix.scales
        if matrix.multipliers is not None:
            tensors[name + MULTIPLIERS] = matrix.multipliers
    overrides = {name: matrix.bits for name, matrix in sorted(head.matrices.items()) if matrix.bits != head.bits}
    metadata = {METADATA: msgspec.json.encode(Description(head.bits, head.architecture, overrides)).decode()}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata=metadata)


def read_head(folder: Path) -> StoredHead:
    """The head of a `qat-head` artifact.

    Raises:
        ArtifactError: the file is missing, cut or not a quantised head.
    """
    path = folder / HEAD_FILE
    try:
        with safe_open(path, framework="numpy") as stored:
            description = msgspec.json.decode(stored.metadata()[METADATA], type=Description)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # a handle, not a dict
        linears = [name.removesuffix(INTEGERS) for name in tensors if name.endswith(INTEGERS)]
        matrices = {
            name: IntegerMatrix(
                tensors.pop(name + INTEGERS),
                tensors.pop(name + SCALES),
                description.overrides.get(name, description.bits),
                tensors.pop(name + MULTIPLIERS, None),
            )
            for name in linears
        }
        return StoredHead(description.architecture, description.bits, matrices, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ArtifactError(
            f"{path} is not a quantised head: {error}", "build it again: hyco-export qat-head"
        ) from error
