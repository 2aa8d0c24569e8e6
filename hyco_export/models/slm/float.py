"""Unquantised SLM checkpoints as a source of weights that are rounded while they are read.

The same interface as `slm.packed.PackedCheckpoint`. Linears become 4- or 8-bit integers with the scales of the clip
search (`weight_rounding`), embedding tables 8-bit rows. What a checkpoint must hold is taken from transformers' model
of its family, built empty. Tensors are read one at a time, tables in slices of rows. `open_checkpoint` opens either
kind; `original_slm` is the network before rounding.

Legend: N output channels or rows, K input channels or columns, S scales of a table's row, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import MatrixShape, PackedMatrix, Weights
from hyco_export.core.tables import PackedRows, TableLayout
from hyco_export.errors import CheckpointError
from hyco_export.models.embedding_table import quantize_rows
from hyco_export.models.families.slm_family import (
    MODEL_PREFIX,
    OUTPUT_LAYER,
    PER_LAYER_TABLE,
    TOKEN_TABLE,
    find_family,
)
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.slm.surgery import network_vectors
from hyco_export.models.tensor_files import FETCH_HINT, TensorFiles, require_all_read, text_names
from hyco_export.models.torch_ops import TorchWeights
from hyco_export.models.verifier import empty_model, load_config
from hyco_export.models.weight_rounding import searched_matrix

TABLE_BITS = 8
TABLE_BLOCK = 32  # columns of a token's row that share a scale, as GGUF's Q8_0 has it: such a table stays as it is
ROWS_AT_ONCE = 4096  # 147 MB of float32 at the 8,960 columns of E2B's per-layer table


@dataclass(frozen=True)
class Rounding:
    """Widths of the linear layers, and the clip ratios among which each channel's grid is searched."""

    bits: int
    output_bits: int
    ratios: np.ndarray

    def of(self, module: str) -> int:
        """The width of one linear layer."""
        return self.output_bits if module == OUTPUT_LAYER else self.bits


@dataclass(frozen=True)
class FloatModule:
    """One linear layer or embedding of the model."""

    name: str
    bits: int
    rows: int  # N
    columns: int  # K
    factor: float | None  # of an embedding, None for a linear
    scales: int  # S of an embedding, 1 for a linear


class FloatCheckpoint:
    """A checked checkpoint: every tensor the model needs is there with its shape.

    Args:
        folder: checkpoint folder.
        rounding: how its linear layers become integers.

    Raises:
        CheckpointError: another model, already quantised, a tensor missing, misshaped, twice there or read by no
            module, a file cut short; names it.
    """

    def __init__(self, folder: Path, rounding: Rounding) -> None:
        whole = load_config(folder)
        self.config: Any = whole.get_text_config()
        self._files = TensorFiles(folder)
        self._ratios = rounding.ratios
        model = _empty(folder)
        self.modules = {module.name: module for module in float_modules(model, rounding)}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.vectors = tuple(name for name in shapes if name.rpartition(".")[0] not in self.modules)
        stored = text_names(self._files)
        self._stored = {name: stored.get(self._source(name, stored)) for name in shapes}
        for name, shape in shapes.items():
            self._check(name, shape)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        require_all_read(self._files, stored, shapes, ignored, whole is self.config)

    @property
    def clip_ratios(self) -> tuple[float, float]:
        """Least and greatest of the search."""
        return float(self._ratios.min()), float(self._ratios.max())

    @property
    def linears(self) -> dict[str, MatrixShape]:
        """Shape of every linear layer by module name."""
        return {
            name: MatrixShape(module.rows, module.columns, module.bits)
            for name, module in self.modules.items()
            if module.factor is None
        }

    def matrix(self, name: str, rows: np.ndarray | None = None) -> PackedMatrix:
        """A linear layer, rounded: all its output channels or `rows` (ascending)."""
        weight = torch.from_numpy(self.float_matrix(name, rows))
        return searched_matrix(weight, self.modules[name].bits, self._ratios).packed()

    def float_matrix(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """float32 [N, K] of a linear layer as it is stored, all output channels or `rows` (ascending)."""
        return self.vector(f"{name}.weight") if rows is None else self._rows(f"{name}.weight", rows)

    def table(self, name: str, extra_factor: float = 1.0) -> PackedRows:
        """An embedding in 8 bits with a scale per block of a row, of a per-layer one per layer."""
        module = self.modules[name]
        tensor = self._require(f"{name}.weight")
        integers = np.empty((module.rows, module.columns), np.int8)
        scales = np.empty((module.rows, module.scales), np.float32)
        for start in range(0, module.rows, ROWS_AT_ONCE):
            real = self._files.rows(tensor, start, start + ROWS_AT_ONCE)
            rounded = quantize_rows(real.reshape(-1, module.columns // module.scales))
            integers[start : start + len(real)] = rounded.integers.reshape(len(real), -1)
            scales[start : start + len(real)] = rounded.scale.reshape(len(real), -1)
        layout = TableLayout(TABLE_BITS, module.columns, float(module.factor or 1.0) * extra_factor)
        return PackedRows(integers, scales, layout)

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of an embedding before rounding, float32 [n, K] of ids [n], the model's factor inside."""
        tensor = self._require(f"{name}.weight")
        found = np.concatenate([self._files.rows(tensor, int(row), int(row) + 1) for row in ids])
        return found * np.float32(self.modules[name].factor or 1.0)

    def vector(self, name: str) -> np.ndarray:
        """A whole parameter or buffer, float32."""
        return self._files.get(self._require(name))

    def require_finite(self) -> None:
        """Read every tensor once. Raises CheckpointError: one holds an infinity or NaN; names it and its file."""
        self._files.require_finite({self._require(name) for name in self._stored})

    def _rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        tensor = self._require(name)
        parts = []
        for start in range(0, int(rows[-1]) + 1, ROWS_AT_ONCE):
            first, last = np.searchsorted(rows, (start, start + ROWS_AT_ONCE))
            if first < last:
                parts.append(self._files.rows(tensor, start, start + ROWS_AT_ONCE)[rows[first:last] - start])
        return np.concatenate(parts)

    def _source(self, name: str, stored: Mapping[str, str]) -> str:
        """A tied output layer is not stored: its rows are those of the token table."""
        tied = name == f"{OUTPUT_LAYER}.weight" and name not in stored and self.config.tie_word_embeddings
        return f"{TOKEN_TABLE}.weight" if tied else name

    def _require(self, name: str) -> str:
        found = self._stored[name]
        if found is None:
            raise CheckpointError(f"checkpoint {self._files.folder} has no tensor {name}", FETCH_HINT)
        return found

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._files.shape(self._require(name))
        if found != shape:
            raise CheckpointError(
                f"{name} is stored as {list(found)}, the config asks for {list(shape)}",
                "the config and the weights are of different models",
            )


def _empty(folder: Path) -> PreTrainedModel:
    """Raises CheckpointError: of no family, or no model can be made of the config."""
    config = load_config(folder).get_text_config()
    return empty_model(find_family(config, folder).model, config)


def float_stock(folder: Path) -> PreTrainedModel:
    """transformers' own model of the checkpoint in float32: the reference of the static network."""
    config = load_config(folder).get_text_config()
    kind = find_family(config, folder).model
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def _blocks(columns: int) -> int:
    """S of a token's row: a scale for each block, or one for a row of another width."""
    return columns // TABLE_BLOCK if columns % TABLE_BLOCK == 0 else 1


def float_modules(model: PreTrainedModel, rounding: Rounding) -> list[FloatModule]:
    """Every linear layer and embedding."""
    found = []
    layers = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.append(FloatModule(name, rounding.of(name), module.out_features, module.in_features, None, 1))
        elif isinstance(module, nn.Embedding):
            size = (module.num_embeddings, module.embedding_dim)
            factor: Any = getattr(module, "scalar_embed_scale", 1.0)  # Gemma's embeddings alone have one
            blocks = layers if name == PER_LAYER_TABLE else _blocks(module.embedding_dim)
            found.append(FloatModule(name, TABLE_BITS, *size, float(factor), blocks))
    return found


# ---- either kind of checkpoint


def open_checkpoint(folder: Path, rounding: Rounding | None) -> PackedCheckpoint | FloatCheckpoint:
    """The checked checkpoint; `rounding` says how an unquantised one becomes integers.

    Raises:
        CheckpointError: unreadable or incomplete; quantised and yet to be rounded, or unquantised and no word how.
    """
    require_rounding(load_config(folder), str(folder), rounding)
    return PackedCheckpoint(folder) if rounding is None else FloatCheckpoint(folder, rounding)


def require_rounding(config: PreTrainedConfig, checkpoint: str, rounding: Rounding | None) -> None:
    """Raises CheckpointError: quantised and yet to be rounded, or unquantised and no word how."""
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised and rounding is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint} is quantised: its integers are used as they are",
            "remove $.slm.weights, or give the unquantised checkpoint",
        )
    if not quantised and rounding is None:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not quantised",
            "say in $.slm.weights how to round it, or give one in the mobile QAT layout of transformers' quantizer",
        )


# ---- the network before rounding


def original_slm(checkpoint: FloatCheckpoint, network: SlmNetwork, kept: np.ndarray) -> FloatSlm:
    """The float network; its output layer has the rows of the token ids `kept` [V] only."""
    matrices = {
        name.removeprefix(MODEL_PREFIX): checkpoint.float_matrix(name, kept if name == OUTPUT_LAYER else None)
        for name in checkpoint.linears
    }
    return FloatSlm(network, TorchWeights(Weights(matrices, network_vectors(checkpoint), {})))


class OriginalEmbeddings:
    """Embedding rows, read from the checkpoint's files as they are asked for (`EmbeddingRows`)."""

    def __init__(self, checkpoint: FloatCheckpoint) -> None:
        self._checkpoint = checkpoint

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        """float32 [n, H] of ids [n]."""
        return self._checkpoint.rows(TOKEN_TABLE, ids)

    def per_layer(self, ids: np.ndarray) -> np.ndarray:
        """float32 [n, L * P] of ids [n], their share of the sum inside."""
        share = find_family(self._checkpoint.config, PER_LAYER_TABLE).per_layer_share
        return self._checkpoint.rows(PER_LAYER_TABLE, ids) * np.float32(share)
