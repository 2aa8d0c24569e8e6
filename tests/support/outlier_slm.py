"""Packed SLM checkpoints with an outlier channel in the residual stream, as trained Gemma models have them."""

from pathlib import Path

from safetensors.torch import load_file, save_file

FIRST = "model.layers.0."
STREAM_NORMS = ("input_layernorm.weight", "pre_feedforward_layernorm.weight", "model.norm.weight")
LOUD = 1e4  # of the MLP's output in that channel: behind a norm nearly every row has it at one size
TYPICAL_SIZE = 4.0  # of the stream's other channels


def plant_outlier(folder: Path, channel: int, size: float) -> Path:
    """Let the first layer's MLP write +-size into one channel, in every row, and nothing into the others.

    The norms that read the stream afterwards get weights that leave the other channels about the size they had, and of
    this one nothing: what a model does that was trained with such a channel.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    written = tensors[f"{FIRST}post_feedforward_layernorm.weight"]
    root = len(written) ** 0.5  # a row with one great value has it here after a norm
    for name, tensor in tensors.items():
        early = name.startswith((f"{FIRST}input_layernorm", f"{FIRST}pre_feedforward_layernorm"))
        if name.endswith(STREAM_NORMS) and not early:
            tensor *= size / root / TYPICAL_SIZE
            tensor[channel] = 0.0
        elif name.endswith("per_layer_input_gate.weight"):  # it reads the stream without a norm
            tensor[:, channel] = 0
    tensors[f"{FIRST}mlp.down_proj.weight_scale"][channel] *= LOUD
    written.zero_()
    written[channel] = size / root
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
