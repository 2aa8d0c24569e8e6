"""The static SLM on disk: one safetensors file with its shape, packed integers, scales and norms.

`<linear>.integers` packed as in the checkpoint (`core.packing`), `<linear>.scales` float32 [N], `<norm>` float32 [n];
metadata `shape` (JSON of `SlmShape`). The output layer has the kept rows only. The float back end is rebuilt from it;
the graphs hold the same integers.
"""

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import IntegerMatrix, Weights
from hyco_export.core.packing import pack_rows, unpack_rows
from hyco_export.errors import ArtifactError

WEIGHTS_FILE = "slm_weights.safetensors"
INTEGERS, SCALES = ".integers", ".scales"
SHAPE_KEY = "shape"  # one key: safetensors writes several in no fixed order, and equal inputs must give equal bytes


class LinearLayout(msgspec.Struct, frozen=True):
    """How a linear layer's integers are packed."""

    bits: int
    width: int


class SlmShape(msgspec.Struct, frozen=True):
    """What the tensors alone do not say."""

    network: SlmNetwork
    linears: dict[str, LinearLayout]


def write_slm(path: Path, network: SlmNetwork, weights: Weights) -> None:
    """Write the file; every matrix must be in integers."""
    tensors = {name: np.ascontiguousarray(vector) for name, vector in weights.vectors.items()}
    layouts = {}
    for name, matrix in weights.matrices.items():
        assert isinstance(matrix, IntegerMatrix), name
        layouts[name] = LinearLayout(matrix.bits, matrix.integers.shape[1])
        tensors[name + INTEGERS] = np.ascontiguousarray(pack_rows(matrix.integers, matrix.bits))
        tensors[name + SCALES] = np.ascontiguousarray(matrix.scales)
    shape = msgspec.json.encode(SlmShape(network, layouts)).decode()
    save_file(tensors, path, metadata={SHAPE_KEY: shape})


def linears_of_width(path: Path, bits: int) -> tuple[str, ...]:
    """Names of the linear layers whose integers have `bits` bits; reads no weights.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            shape = msgspec.json.decode((file.metadata() or {})[SHAPE_KEY], type=SlmShape)
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(
            f"SLM weights {path} cannot be read: {error}", "build it again: hyco-export convert-slm"
        ) from error
    return tuple(sorted(name for name, layout in shape.linears.items() if layout.bits == bits))


def read_slm(path: Path) -> tuple[SlmNetwork, Weights]:
    """The network and its weights.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    hint = "build it again: hyco-export convert-slm"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a dict
        shape = msgspec.json.decode(metadata[SHAPE_KEY], type=SlmShape)
        matrices = {
            name: IntegerMatrix(
                unpack_rows(tensors.pop(name + INTEGERS), layout.bits, layout.width),
                tensors.pop(name + SCALES),
                layout.bits,
            )
            for name, layout in shape.linears.items()
        }
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"SLM weights {path} cannot be read: {error}", hint) from error
    return shape.network, Weights(matrices, tensors, {})
