"""SLM checkpoints in the layout of Google's mobile QAT release: packed integers and scales, read without dequantising.

The layout is that of transformers' Gemma quantizer (`integrations/gemma_quant.py`): linears of 2, 4 or 8 bits with one
scale per output channel, embedding tables with scales per row. What a checkpoint must hold is taken from transformers
itself: its quantizer is applied to an empty model, whose parameters are then looked for in the files. Activation scales
are read by nobody here (the graphs have 16-bit ranges of their own); cache scales are ignored by transformers too.

Legend: N output channels or rows, K input channels or columns.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from hyco_export.core.encodings import WIDTHS, unpack_rows
from hyco_export.core.network.weights import MatrixShape, PackedMatrix
from hyco_export.core.tables import PackedRows, TableLayout
from hyco_export.errors import CheckpointError
from hyco_export.models.families.gemma4 import LanguageModel, ScaledEmbedding
from hyco_export.models.families.gemma4_packed import (
    PackingConfig,
    QuantizedEmbedding,
    QuantizedLinear,
    replace_with_quant_layers,
)
from hyco_export.models.tensor_files import FETCH_HINT, TensorFiles, require_all_read, text_names
from hyco_export.models.verifier import empty_model, load_config

PACKED_TYPES = {2: "U8", 4: "U8", 8: "I8"}  # safetensors' names, by width
FLOAT_TYPES = ("F32", "BF16", "F16")
PACKED_TYPE = "gemma4_text"  # the model type that transformers' quantizer is for
ROUNDED_TYPES = ("gemma3_text", "gemma4_text")  # those that are read unquantised (`slm.float`)
SIZES_HINT = "sizes or num_bits in config.json are of another model than the weights: fetch the checkpoint again"
LAYOUT_HINT = "give a checkpoint in the mobile QAT layout of transformers' Gemma quantizer"


@dataclass(frozen=True)
class PackedModule:
    """One quantised module of the model: stored tensor shape and dtype follow from these."""

    name: str
    bits: int
    rows: int  # N
    columns: int  # K
    factor: float | None  # of an embedding, None for a linear
    scales: int = 1  # of a row

    @property
    def tensor(self) -> str:
        """Name of the packed integers."""
        return f"{self.name}.weight" if self.factor is None else f"{self.name}.embedding_quantized"

    @property
    def scale_tensor(self) -> str:
        return f"{self.name}.weight_scale" if self.factor is None else f"{self.name}.embedding_scale"


class PackedCheckpoint:
    """A checked checkpoint: every tensor the model needs is there, of the type and shape its width asks for.

    Args:
        folder: checkpoint folder.

    Raises:
        CheckpointError: not quantised, a tensor missing, twice there or read by no module, of another shape or type,
            a scale that is not positive, a file missing or cut short; names it.
    """

    def __init__(self, folder: Path) -> None:
        whole = load_config(folder)
        self.config: Any = whole.get_text_config()
        self._files = TensorFiles(folder)
        self._stored = text_names(self._files)
        model = empty_quantised(whole)
        self.modules, self._vector_shapes = _expected(model)
        for module in self.modules.values():
            self._check(module)
        for name, shape in self._vector_shapes.items():
            self._check_vector(name, shape)
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        require_all_read(self._files, self._stored, model.state_dict(), ignored, whole is self.config)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of all float parameters and stored buffers."""
        return tuple(self._vector_shapes)

    def integers(self, name: str) -> np.ndarray:
        """int8 [N, K] of a module."""
        module = self.modules[name]
        return unpack_rows(self._get(module.tensor), module.bits, module.columns)

    def scales(self, name: str) -> np.ndarray:
        """float32 [N, S] of a module; S is 1 but for block-wise embeddings.

        Raises:
            CheckpointError: a scale is zero, negative or not finite.
        """
        tensor = self.modules[name].scale_tensor
        scales = self._get(tensor)
        bad = np.flatnonzero(~(np.isfinite(scales) & (scales > 0)).all(axis=-1))
        if len(bad):
            raise CheckpointError(
                f"{self._files.path(self._require(tensor))}: {tensor}: scale of row {bad[0]} is "
                f"{scales[bad[0]].tolist()}, {len(bad)} rows are not finite and positive",
                "fetch or save the checkpoint again: scales of 0 are of one that was never calibrated",
            )
        return scales

    def matrix(self, name: str, rows: np.ndarray | None = None) -> PackedMatrix:
        """A linear layer, still packed: all its output channels or `rows`."""
        module = self.modules[name]
        integers, scales = self._get(module.tensor), self.scales(name)[:, 0]
        if rows is not None:
            integers, scales = integers[rows], scales[rows]
        return PackedMatrix(integers, scales, module.bits, module.columns)

    @property
    def linears(self) -> dict[str, MatrixShape]:
        """Shape of every linear layer by module name."""
        return {
            name: MatrixShape(module.rows, module.columns, module.bits)
            for name, module in self.modules.items()
            if module.factor is None
        }

    def table(self, name: str, extra_factor: float = 1.0) -> PackedRows:
        """An embedding, still packed; its factor is the model's own times `extra_factor`."""
        module = self.modules[name]
        layout = TableLayout(module.bits, module.columns, float(module.factor or 1.0) * extra_factor)
        return PackedRows(self._get(module.tensor), self.scales(name), layout)

    def vector(self, name: str) -> np.ndarray:
        """A float parameter or buffer, float32."""
        return self._get(name)

    def require_finite(self) -> None:
        """Read every vector; scales were. Raises CheckpointError: one is not finite; names it and its file."""
        self._files.require_finite(self._stored[name] for name in self._vector_shapes)

    def _get(self, name: str) -> np.ndarray:
        return self._files.get(self._require(name))

    def _require(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"checkpoint {self._files.folder} has no tensor {name}", FETCH_HINT)
        return self._stored[name]

    def _check(self, module: PackedModule) -> None:
        """Packed integers must have the shape of their width, and one or more scales per row."""
        per_byte = 8 // module.bits
        wanted = (module.rows, -(-module.columns // per_byte))
        stored = self._require(module.tensor)
        found, kind = self._files.shape(stored), self._files.dtype(stored)
        if kind != PACKED_TYPES[module.bits]:
            raise CheckpointError(
                f"{module.tensor} is stored as {kind}; {module.bits} bits are {PACKED_TYPES[module.bits]}", LAYOUT_HINT
            )
        if found != wanted:
            raise CheckpointError(
                f"{module.tensor} is stored as {list(found)}; {module.bits} bits of [{module.rows}, {module.columns}] "
                f"are {list(wanted)}",
                SIZES_HINT,
            )
        self._check_float(module.scale_tensor)
        scales = self._files.shape(self._require(module.scale_tensor))
        if len(scales) != 2 or scales[0] != module.rows or not scales[1] or module.columns % scales[1]:
            raise CheckpointError(f"{module.scale_tensor} is {list(scales)}, expected [{module.rows}, 1]", LAYOUT_HINT)
        self.scales(module.name)

    def _check_vector(self, name: str, wanted: tuple[int, ...]) -> None:
        self._check_float(name)
        found = self._files.shape(self._require(name))
        if found != wanted:
            raise CheckpointError(f"{name} is {list(found)}, the model's config asks for {list(wanted)}", SIZES_HINT)

    def _check_float(self, name: str) -> None:
        kind = self._files.dtype(self._require(name))
        if kind not in FLOAT_TYPES:
            raise CheckpointError(f"{name} is stored as {kind}, expected one of {list(FLOAT_TYPES)}", LAYOUT_HINT)


class ModuleWidth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the modules whose names a pattern matches."""

    num_bits: int = 4


class QuantizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint's `quantization_config`; `quant_method` may be missing."""

    quant_method: Literal["gemma"] = "gemma"
    num_bits: int = 4
    quantize_embeddings: bool = False
    module_quant_configs: dict[str, ModuleWidth] | None = None
    modules_to_not_convert: list[str] | None = None


def quantization_config(config: PreTrainedConfig) -> PackingConfig:
    """The checkpoint's quantizer settings; every module counts unless it is listed.

    Raises:
        CheckpointError: the checkpoint is not quantised, by another method, or to a width that cannot be packed.
    """
    raw: Any = getattr(config, "quantization_config", None)
    if raw is None:
        raise CheckpointError(f"checkpoint {config.name_or_path} is not quantised", LAYOUT_HINT)
    given = dict(raw) if isinstance(raw, dict) else raw.to_dict()
    try:
        settings = msgspec.convert(msgspec.to_builtins(given, enc_hook=str), QuantizerSettings)
    except msgspec.ValidationError as error:
        method = given.get("quant_method", "gemma")
        raise CheckpointError(
            f"checkpoint {config.name_or_path} is quantised with {method!r}, not in the mobile QAT layout: {error}",
            LAYOUT_HINT,
        ) from error
    widths = {"*": settings.num_bits} | {rule: w.num_bits for rule, w in (settings.module_quant_configs or {}).items()}
    for pattern, bits in widths.items():
        if bits not in WIDTHS:
            raise CheckpointError(f"num_bits of {pattern} is {bits}, not one of {list(WIDTHS)}", LAYOUT_HINT)
    for pattern in (*(settings.module_quant_configs or {}), *(settings.modules_to_not_convert or ())):
        _require_pattern(pattern, config)
    named = msgspec.to_builtins(settings)
    del named["quant_method"]
    return PackingConfig(**named | {"modules_to_not_convert": settings.modules_to_not_convert or []})


def _require_pattern(pattern: str, config: PreTrainedConfig) -> None:
    """Raises CheckpointError: a name of modules that is not a regular expression, as transformers takes it."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"quantization_config of {config.name_or_path}: {pattern!r} is not a regular expression: {error}",
            "correct config.json, or fetch the checkpoint again",
        ) from error


def stock_model(folder: Path) -> LanguageModel:
    """transformers' own model of the checkpoint in float32, its rounding of activations switched off.

    Activation scales of 0 mean "leave alone" (`apply_srq`): the float reference of graphs whose activations have
    16-bit ranges of their own.
    """
    whole = load_config(folder)
    config = whole.get_text_config()
    config.quantization_config = quantization_config(whole).to_dict()
    model = LanguageModel.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.input_activation_scale.data.zero_()
            module.output_activation_scale.data.zero_()
    return model.eval()


def empty_quantised(config: PreTrainedConfig) -> LanguageModel:
    """The text model of a packed checkpoint's config with transformers' quantised layers, without memory.

    Raises:
        CheckpointError: none can be made of it, or it leaves a linear layer in floats.
    """
    settings = quantization_config(config)
    text: Any = config.get_text_config()
    if text.model_type != PACKED_TYPE:
        raise CheckpointError(
            f"{config.name_or_path} is a packed {text.model_type!r} model, only {PACKED_TYPE} is read packed",
            "give the unquantised checkpoint, with the widths to round it to under $.slm.weights"
            if text.model_type in ROUNDED_TYPES
            else f"correct $.models.slm: an SLM must be one of {', '.join(ROUNDED_TYPES)}",
        )
    model = empty_model(LanguageModel, text)
    with torch.device("meta"):
        replace_with_quant_layers(model, settings, settings.modules_to_not_convert)
    floats = [name for name, module in model.named_modules() if type(module) in (nn.Linear, ScaledEmbedding)]
    if floats:
        raise CheckpointError(
            f"quantization_config of {config.name_or_path} leaves {len(floats)} modules in floats, first {floats[0]} "
            f"(modules_to_not_convert: {settings.modules_to_not_convert}, quantize_embeddings: "
            f"{settings.quantize_embeddings}); the graphs need integers of every one",
            "quantise these modules too (8 bits lose least), or give the unquantised checkpoint with $.slm.weights",
        )
    return model


def _expected(model: LanguageModel) -> tuple[dict[str, PackedModule], dict[str, tuple[int, ...]]]:
    """Quantised modules by name, and the shapes of all other parameters and stored buffers."""
    modules = {module.name: module for module in packed_modules(model)}
    others = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in modules
    }
    return modules, others


def packed_modules(model: nn.Module) -> list[PackedModule]:
    """Every linear layer and embedding of a model whose layers are transformers' quantised ones."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            found.append(PackedModule(name, module.num_bits, module.out_features, module.in_features, None))
        elif isinstance(module, QuantizedEmbedding):
            size = (module.num_embeddings, module.embedding_dim)
            found.append(PackedModule(name, module.num_bits, *size, float(module.scalar_embed_scale)))
    return found
