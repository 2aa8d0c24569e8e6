"""Which kind of checkpoint an SLM's folder holds: packed integers, or floats that are yet to be rounded."""

from pathlib import Path

from transformers import PreTrainedConfig

from hyco_export.errors import CheckpointError
from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint, Rounding
from hyco_export.nn.slm.gemma_quant import PackedCheckpoint
from hyco_export.nn.verifier import load_config


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
