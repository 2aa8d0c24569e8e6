"""Where a training stands after a step, and its checkpoints: enough to go on to the same bytes.

A state is the trained parameters, the optimiser's moments and the loss curve so far; the step is the curve's length,
and the order of the sequences follows from the seed and the step (`nn.head.qat`). Knows parameters by name and files;
not the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load_file, save_file

from hyco_export.core.artifact import WORK_FOLDER
from hyco_export.core.partial import PartialBuild

Parameters = Mapping[str, torch.nn.Parameter]
UNIT = "training"
WEIGHT = "weight"  # beside the names of the optimiser's own tensors: step, exp_avg, exp_avg_sq


class TrainingPoint(msgspec.Struct, frozen=True):
    """One step of the loss curve. `loss` is the mean KL of its sequences in nats per token."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float


@dataclass(frozen=True)
class TrainingState:
    """`tensors` by `<parameter>|<name>`: the weight and what the optimiser keeps of it; `curve` of the steps done."""

    curve: tuple[TrainingPoint, ...]
    tensors: dict[str, torch.Tensor]


def state_of(trained: Parameters, optimiser: torch.optim.Optimizer, curve: Sequence[TrainingPoint]) -> TrainingState:
    """The state after the last step of `curve`."""
    tensors = {}
    for name, parameter in trained.items():
        tensors[f"{name}|{WEIGHT}"] = parameter.detach()
        tensors |= {f"{name}|{key}": value for key, value in optimiser.state[parameter].items()}
    return TrainingState(tuple(curve), tensors)


def restore(state: TrainingState, trained: Parameters, optimiser: torch.optim.Optimizer) -> None:
    """Put weights and moments back in place."""
    for key, tensor in state.tensors.items():
        name, _, kind = key.rpartition("|")
        parameter = trained[name]
        if kind == WEIGHT:
            parameter.data.copy_(tensor)
        else:  # AdamW counts its steps on the CPU
            optimiser.state[parameter][kind] = tensor if kind == "step" else tensor.to(parameter.device)


class Checkpoints:
    """The newest state of a training inside an unfinished build; an older one is removed once a newer one is whole.

    Args:
        partial: the build.
        every: steps from one checkpoint to the next.
    """

    def __init__(self, partial: PartialBuild, every: int) -> None:
        self._partial = partial
        self._every = every

    def due(self, step: int) -> bool:
        """Is the state to be saved after this many steps?"""
        return step % self._every == 0

    def save(self, state: TrainingState) -> None:
        """Write a state; the one before stays in force until this one is whole."""
        name = _file_name(len(state.curve))
        with self._partial.place(name) as draft:
            save_file({key: tensor.contiguous() for key, tensor in state.tensors.items()}, draft)
        self._partial.finish(UNIT, [name], state.curve)
        for path in self._partial.build_dir.glob(_file_name("*")):
            if path != self._partial.build_dir / name:
                path.unlink(missing_ok=True)

    def newest(self) -> int:
        """Steps of the newest whole state; 0 when there is none."""
        receipt = self._partial.finished(UNIT)
        return len(receipt.note) if receipt else 0

    def load(self) -> TrainingState:
        """The state that `newest` found."""
        receipt = self._partial.finished(UNIT)
        assert receipt is not None, "newest() found one"
        curve = msgspec.convert(receipt.note, tuple[TrainingPoint, ...])
        return TrainingState(curve, load_file(self._partial.build_dir / _file_name(len(curve))))


def _file_name(step: int | str) -> str:
    return f"{WORK_FOLDER}/{UNIT}-{step}.safetensors"
