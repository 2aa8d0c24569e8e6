"""From a checkpoint to the static SLM: its shape, and its weights under the names the network uses.

Surgery (HyCo, Appendix A): integers and scales stay as they are; the output layer keeps the rows of the keep set;
constant factors move into norm weights. What differs between architectures comes from the checkpoint's family
(`models.families`); what a checkpoint of any layout must give is `SlmCheckpoint`. Legend: V kept tokens.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import MatrixShape, PackedMatrices, PackedMatrix, Weights
from hyco_export.core.tables import PER_LAYER, TOKENS, PackedRows
from hyco_export.models.families.config_fields import require_honoured
from hyco_export.models.families.slm_family import (
    MODEL_PREFIX,
    OUTPUT_LAYER,
    PER_LAYER_TABLE,
    TOKEN_TABLE,
    ReadVector,
    Rings,
    find_family,
)


class SlmCheckpoint(Protocol):
    """Where an SLM's parts come from, by the module and tensor names of transformers' model."""

    @property
    def config(self) -> Any:
        """The text model's."""
        ...

    @property
    def vectors(self) -> Collection[str]:
        """Names of norm weights and stored buffers."""
        ...

    @property
    def linears(self) -> Mapping[str, MatrixShape]:
        """Every linear layer, the output layer among them."""
        ...

    def matrix(self, name: str, rows: np.ndarray | None = None) -> PackedMatrix:
        """One linear layer, all its output channels or `rows` (ascending); read, or quantised, at every call."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """float32."""
        ...

    def table(self, name: str, extra_factor: float = 1.0) -> PackedRows:
        """One embedding with its own factor times `extra_factor`, for the host."""
        ...


def slm_network(checkpoint: SlmCheckpoint, rings: Rings) -> SlmNetwork:
    """The static network of a checkpoint over rings of these capacities (by `sliding` and `full`).

    Raises:
        CheckpointError: the model has a part that the static network does not.
    """
    return network_of(checkpoint.config, rings, checkpoint.vector)


def network_of(text: Any, rings: Rings, read: ReadVector) -> SlmNetwork:
    """The static network of a text config; `read` gives the tensors of the checkpoint that a family needs for it.

    Raises:
        CheckpointError: the config is of no family, or asks for a part that the static network does not have.
    """
    family = find_family(text, text.name_or_path)
    require_honoured(text, "SLM")
    return family.network(text, rings, read)


def slm_weights(checkpoint: SlmCheckpoint, kept: np.ndarray) -> Weights:
    """Weights by the network's names; the output layer has the rows of the token ids `kept` [V] only.

    Linear layers are read from the checkpoint when they are asked for.
    """
    modules = {name.removeprefix(MODEL_PREFIX): name for name in checkpoint.linears}
    shapes = {name: checkpoint.linears[module] for name, module in modules.items()}
    shapes[OUTPUT_LAYER] = replace(shapes[OUTPUT_LAYER], rows=len(kept))

    def read(name: str) -> PackedMatrix:
        return checkpoint.matrix(modules[name], kept if name == OUTPUT_LAYER else None)

    return Weights(PackedMatrices(shapes, read), network_vectors(checkpoint), {})


def network_vectors(checkpoint: SlmCheckpoint) -> dict[str, np.ndarray]:
    """Norm weights by the network's names, constant factors inside."""
    vectors = {
        name.removeprefix(MODEL_PREFIX).removesuffix(".weight"): checkpoint.vector(name)
        for name in checkpoint.vectors
        if name.endswith(".weight")
    }
    return find_family(checkpoint.config, checkpoint.config.name_or_path).norms(checkpoint.config, vectors)


def host_tables(checkpoint: SlmCheckpoint) -> dict[str, PackedRows]:
    """The embedding tables that stay on the host, still packed."""
    tables = {TOKENS: checkpoint.table(TOKEN_TABLE)}
    family = find_family(checkpoint.config, checkpoint.config.name_or_path)
    if family.per_layer_width(checkpoint.config):
        tables[PER_LAYER] = checkpoint.table(PER_LAYER_TABLE, family.per_layer_share)
    return tables
