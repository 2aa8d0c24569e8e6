"""Quantisation-aware training of the head's linear weights (Table 4 of the paper), over one step or all K steps.

Loss: KL divergence from the original head (teacher) to the fake-quantised one (student) on response tokens. With
`unrolled_steps` = K it is the mean over the K depths; at each depth a head reads the sequence's token and its own
state. The device drafts so: training on one step would not see the errors that accumulate in the state.

The processes of a launch divide the packs of every step among them. All add up the gradients in the order of the packs,
as one process would: every number of processes gives the same bits.

Legend: R root positions, V vocabulary.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, parametrize

from hyco_export.core.artifact import WORK_FOLDER, PartialBuild
from hyco_export.core.estimates.shapes import PACKED_ROWS
from hyco_export.errors import RecipeError
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.unroll import RootRows, pack, unroll
from hyco_export.models.process_group import ALONE, ProcessGroup

# ---- the state of a training: a resumed one ends with the same bytes

Parameters = Mapping[str, torch.nn.Parameter]
UNIT = "training"
WEIGHT = "weight"  # the optimiser's own tensors are called step, exp_avg and exp_avg_sq


class TrainingPoint(msgspec.Struct, frozen=True):
    """One step of the loss curve. `loss` is the mean KL of its sequences in nats per token."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float


@dataclass(frozen=True)
class TrainingState:
    """`curve`: of the steps that are done; `tensors`: weights and the optimiser's state, by `<parameter>|<name>`."""

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
    """Load weights and the optimiser's state."""
    for key, tensor in state.tensors.items():
        name, _, kind = key.rpartition("|")
        parameter = trained[name]
        if kind == WEIGHT:
            parameter.data.copy_(tensor)
        else:  # AdamW counts its steps on the CPU
            optimiser.state[parameter][kind] = tensor if kind == "step" else tensor.to(parameter.device)


class Checkpoints:
    """Keeps the newest state of a training in an unfinished build.

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
        """Write a state, then remove the one before."""
        name = _file_name(len(state.curve))
        with self._partial.place(name) as draft:
            save_file({key: tensor.contiguous() for key, tensor in state.tensors.items()}, draft)
        self._partial.finish(UNIT, [name], state.curve)
        for path in self._partial.build_dir.glob(_file_name("*")):
            if path != self._partial.build_dir / name:
                path.unlink(missing_ok=True)

    def newest(self) -> int:
        """Steps of the newest complete state; 0 when there is none."""
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


@dataclass(frozen=True)
class TrainingPlan:
    """Optimiser settings; the recipe's `qat` section says where each comes from.

    Attributes:
        learning_rate: peak; linear warm-up over `warmup_steps`, then a cosine to 0 at `steps`.
        accumulation: sequences per step.
        unrolled_steps: depths in the loss.
        autocast: precision of the student's matrix products.
        seed: of the order of the sequences.
    """

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    gradient_norm_clip: float
    warmup_steps: int
    steps: int
    accumulation: int
    unrolled_steps: int
    autocast: torch.dtype
    seed: int


def train(
    student: HeadModel,
    teacher: HeadModel,
    sequences: Sequence[RootRows],
    plan: TrainingPlan,
    report: Callable[[TrainingPoint], None],
    group: ProcessGroup = ALONE,
    checkpoints: Checkpoints | None = None,
) -> list[TrainingPoint]:
    """Train the student's weights in place; fake quantisers are attached, the weights behind them are float32.

    Resumes from the newest checkpoint. The result depends on the seed and the number of threads, not on interruptions
    or the number of processes.

    Args:
        report: called with every step of the curve, those before a checkpoint included.
        checkpoints: where states are saved and found; None saves none.

    Raises:
        RecipeError: the loss is no longer finite.
        ProcessGroupError: another process of the launch is gone.
    """
    trainer = Trainer(student, teacher, plan, group)
    curve = list(_go_on(trainer, checkpoints))
    for point in curve:
        report(point)
    for step, chosen in islice(enumerate(draws(len(sequences), plan)), len(curve), None):
        curve.append(trainer.step(step, [sequences[index] for index in chosen]))
        report(curve[-1])
        if checkpoints and group.main and checkpoints.due(step + 1):
            checkpoints.save(state_of(trainer.trained, trainer.optimiser, curve))
    return curve


class Trainer:
    """Student, teacher and optimiser of a training; each step changes the student's weights."""

    def __init__(
        self,
        student: HeadModel,
        teacher: HeadModel,
        plan: TrainingPlan,
        group: ProcessGroup,
    ) -> None:
        self.group = group
        self.trained: Parameters = {name: each for name, each in student.named_parameters() if each.requires_grad}
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), lr=plan.learning_rate, betas=plan.betas, weight_decay=plan.weight_decay
        )
        self._student = student
        self._teacher = teacher
        self._plan = plan

    def step(self, number: int, sequences: Sequence[RootRows]) -> TrainingPoint:
        """One optimiser step.

        Raises:
            RecipeError: the loss is no longer finite.
            ProcessGroupError: another process of the launch is gone.
        """
        plan = self._plan
        rate = plan.learning_rate * rate_factor(number, plan.warmup_steps, plan.steps)
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.zero_grad()
        parts = list(groups(sequences, PACKED_ROWS))
        rounds = [parts[start : start + self.group.size] for start in range(0, len(parts), self.group.size)]
        total = sum(loss for parts in rounds for loss in self._round(parts))
        norm = float(clip_grad_norm_(self.trained.values(), plan.gradient_norm_clip))
        if not math.isfinite(total):
            raise RecipeError(f"the training loss is {total} at step {number}", "lower $.qat.learning_rate")
        self.optimiser.step()
        return TrainingPoint(number, total, rate, norm)

    def _round(self, parts: Sequence[Sequence[RootRows]]) -> list[float]:
        """Add the gradients of at most one pack a process; the losses of the packs in their order."""
        if self.group.size == 1:
            return [self._backward(parts[0])]
        before = {name: parameter.grad for name, parameter in self.trained.items()}
        self.optimiser.zero_grad()
        loss = self._backward(parts[self.group.rank]) if self.group.rank < len(parts) else 0.0
        for name, parameter in self.trained.items():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # in the order of a single process: ((first + second) + third) ...
            given = [each for each in (before[name], *self.group.gather(own)[: len(parts)]) if each is not None]
            parameter.grad = reduce(torch.add, given)
        losses = self.group.gather(torch.tensor([loss], dtype=torch.float64, device=self._student.device))
        return [float(each) for each in losses[: len(parts)]]

    def _backward(self, part: Sequence[RootRows]) -> float:
        """Add the gradients of one pack; returns its part of the step's loss."""
        loss = packed_loss(self._student, self._teacher, pack(part), self._plan) / self._plan.accumulation
        loss.backward()
        return float(loss.detach())


def _go_on(trainer: Trainer, checkpoints: Checkpoints | None) -> Sequence[TrainingPoint]:
    """Restore the newest checkpoint, the same one in every process; the curve up to it."""
    step = trainer.group.broadcast(checkpoints.newest() if checkpoints and trainer.group.main else 0)
    if not step or checkpoints is None:
        return ()
    state = checkpoints.load()
    restore(state, trainer.trained, trainer.optimiser)
    return state.curve


def packed_loss(student: HeadModel, teacher: HeadModel, rows: RootRows, plan: TrainingPlan) -> torch.Tensor:
    """Sum over the pack's sequences of the mean over depths of the mean KL over the response tokens."""
    with torch.no_grad():
        wanted = unroll(teacher, rows, plan.unrolled_steps)
    device_type = student.device.type
    mixed = torch.autocast(device_type, dtype=plan.autocast, enabled=plan.autocast != torch.float32)
    with mixed, parametrize.cached():  # one fake quantisation, not one per depth
        given = unroll(student, rows, plan.unrolled_steps)
    depths = torch.bincount(rows.sequences).clamp_max(plan.unrolled_steps)  # [sequences] that each can be unrolled
    total = torch.zeros((), device=student.device)
    for depth, (left, right) in enumerate(zip(wanted, given, strict=True)):
        of = rows.sequences[rows.reaching(depth)]
        weights = 1.0 / (torch.bincount(of, minlength=len(depths)) * depths)[of]
        total = total + (divergences(left, right) * weights.to(left.device)).sum()
    return total


def divergences(wanted: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """KL(wanted || given) of each row in nats [R]; logits [R, V] each, computed in float32."""
    return functional.kl_div(
        given.float().log_softmax(dim=-1), wanted.float().log_softmax(dim=-1), reduction="none", log_target=True
    ).sum(dim=-1)


def groups(sequences: Sequence[RootRows], row_limit: int) -> Iterator[list[RootRows]]:
    """The sequences in order, as many at a time as have at most `row_limit` rows together (at least one)."""
    waiting: list[RootRows] = []
    for rows in sequences:
        if waiting and sum(map(len, waiting)) + len(rows) > row_limit:
            yield waiting
            waiting = []
        waiting.append(rows)
    if waiting:
        yield waiting


def packs(sequences: Sequence[RootRows], row_limit: int) -> Iterator[RootRows]:
    """The `groups`, packed."""
    return map(pack, groups(sequences, row_limit))


def rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Share of the peak rate at a step: linear warm-up, then half a cosine that reaches 0 after the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def draws(count: int, plan: TrainingPlan) -> Iterator[list[int]]:
    """Indices of the sequences of every step."""
    order = shuffled_forever(count, plan.seed)
    for _ in range(plan.steps):
        yield list(islice(order, plan.accumulation))


def shuffled_forever(count: int, seed: int) -> Iterator[int]:
    """Indices 0 .. count - 1 again and again, each time in a new order that the seed decides."""
    generator = random.Random(seed)
    while True:
        order = list(range(count))
        generator.shuffle(order)
        yield from order
