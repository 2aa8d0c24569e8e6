"""The verifier's final norm as two values: a head that is handed h from before it must apply it itself.

The head was trained on normed states (transformers hands it `last_hidden_state`); HyCo's hand-off sends h from before
the norm (Appendix A), so the exported graph then starts with it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hyco_export.errors import ArtifactError, first_line


@dataclass(frozen=True)
class FinalNorm:
    """RMS norm over the last axis.

    Attributes:
        weight: float32 [H].
        epsilon: added to the mean square.
    """

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] normed in float32, in its own precision (transformers: Gemma4RMSNorm)."""
        wide = x.float()
        return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.epsilon, -0.5) * self.weight).to(x.dtype)


def final_norm(model: PreTrainedModel) -> FinalNorm:
    """The norm that ends the verifier's backbone."""
    norm = model.get_decoder().norm
    return FinalNorm(norm.weight.detach().float().cpu(), norm.eps)


def save_norm(path: Path, norm: FinalNorm) -> None:
    """Write it as safetensors."""
    save_file({"weight": norm.weight.contiguous()}, path, metadata={"epsilon": repr(norm.epsilon)})


def load_norm(path: Path) -> FinalNorm:
    """Read it back.

    Raises:
        ArtifactError: missing or unreadable.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return FinalNorm(file.get_tensor("weight"), float((file.metadata() or {})["epsilon"]))
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"{path} cannot be read: {first_line(error)}", "build it again: hyco-export capture"
        ) from error
