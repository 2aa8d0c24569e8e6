"""The processes of one launch (`accelerate launch -m hyco_export ...`): rank, device, messages, and a verifier whose
weights are sharded over them.

A process that was started without a launcher is a group of one. Only the main process (rank 0) plans, prints, locks and
publishes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hyco_export.core.handoff import KvShape
from hyco_export.core.recipe import Dtype
from hyco_export.errors import ProcessGroupError
from hyco_export.models.verifier import handoff_layers, layer_kv_shape, load_config, load_shard

Item = TypeVar("Item")
IDLE_TIMEOUT = timedelta(days=3650)  # of a process that waits for its next task: a server may be idle for long
WORK_TIMEOUT = timedelta(days=7)  # of a process that waits for others, which may compile or capture for days
WORLD_SIZE = "WORLD_SIZE"  # set by the launcher
FAILURES_KEY = "hyco-export/failures"


class ProcessGroup:
    """The processes of a launch, as seen by one of them.

    Args:
        rank: number of this process; 0 is the main one.
        size: how many there are.
        device: where this process computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def model_device(self) -> str:
        """transformers' `device_map` for one model: all GPUs where there is one process, else this process's device."""
        return "auto" if self.size == 1 and self.device.type == "cuda" else str(self.device)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's part of the items: every `size`-th, beginning with its rank."""
        return list(items[self.rank :: self.size])

    def broadcast(self, message: Any = None) -> Any:
        """The main process's message, in every process."""
        if self.size == 1:
            return message
        box = [message]
        with _lost_processes():
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Return when all processes have called it."""
        if self.size > 1:
            with _lost_processes():
                distributed.barrier()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all processes, of one shape, on `device`, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _lost_processes():
            distributed.all_gather(found, tensor.contiguous())
        return found


class BroadcastChannel:
    """Sends bytes from the main process to all others through the CPU, so that waiting keeps no GPU busy.

    Every process of the group opens it at the same time.

    Raises:
        ProcessGroupError: another process is gone; also raised by `send` and `receive`.
    """

    def __init__(self) -> None:
        with _lost_processes():
            group = distributed.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        assert isinstance(group, distributed.ProcessGroup)  # all processes are in it
        self._group = group

    def send(self, message: bytes) -> None:
        """Send a message; only in the main process."""
        self._broadcast(torch.tensor([len(message)]))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """The next message, in every other process."""
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast(size)
        message = torch.empty(int(size), dtype=torch.uint8)
        if len(message):
            self._broadcast(message)
        return message.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with _lost_processes():
            distributed.broadcast(tensor, src=0, group=self._group)


ALONE = ProcessGroup(0, 1, torch.device("cpu"))


@contextmanager
def _lost_processes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise when a process is gone
        raise ProcessGroupError(
            "another process of this launch ended before its work was done",
            "read its message, then run the same command again",
        ) from error


@cache
def current_group() -> ProcessGroup:
    """The group of this launch; joins the other processes on the first call."""
    # without GPUs accelerate joins the processes only when it is told to use the CPU
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    launched = int(os.environ.get(WORLD_SIZE, "1")) > 1
    state = PartialState(cpu=on_cpu, **({"timeout": WORK_TIMEOUT} if launched else {}))
    device = torch.device("cpu") if state.device.type == "cpu" else state.device
    return ProcessGroup(state.process_index, state.num_processes, device)


def first_to_fail() -> bool:
    """True in the first process of a launch that calls it: only that one reports its error."""
    if int(os.environ.get(WORLD_SIZE, "1")) == 1:
        return True
    try:
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
        )
        return store.add(FAILURES_KEY, 1) == 1
    except (KeyError, ValueError, distributed.DistError):
        return False  # the launcher's store is gone: the process that failed first has reported


# ---- a verifier in shards, one for each process

ATTENTION, EXPERTS = ".self_attn.", ".experts"  # in the names of transformers' plan
WHOLE = "replicate"  # in transformers' plan: every process holds the whole tensor
TABLE, OUTPUT = "embed_tokens", "lm_head"


def load_sharded_verifier(folder: Path, dtype: Dtype, group: ProcessGroup) -> tuple[PreTrainedModel, "HeadShares"]:
    """This process's shard of a verifier, on its device, and its share of the K/V heads.

    All processes of the launch load at the same time.

    Raises:
        CheckpointError: as `load_verifier`.
    """
    config, distributed = _divided(load_config(folder), group.size)
    model = load_shard(folder, dtype, config, distributed)
    return model, HeadShares(group, model.config.get_text_config())


def _divided(config: PreTrainedConfig, size: int) -> tuple[PreTrainedConfig, DistributedConfig]:
    """The configuration with transformers' plan for `size` processes, and the plan of the output layer."""
    text = config.get_text_config()
    divided = {ATTENTION: divides_heads(text, size), EXPERTS: text.enable_moe_block}
    whole = [part for part, is_divided in divided.items() if not is_divided]
    rules = text.base_model_tp_plan or {}
    plan = {rule: style for rule, style in rules.items() if not any(part in rule for part in whole)}
    text.update({"base_model_tp_plan": plan | {TABLE: WHOLE}})
    return config, DistributedConfig(tp_size=size, tp_plan={OUTPUT: WHOLE})


def divides_heads(text: PreTrainedConfig, size: int) -> bool:
    """Can the attention heads of every layer be divided equally among `size` processes?"""
    heads = {text.num_attention_heads} | {layer_kv_shape(text, index).heads for index in range(text.num_hidden_layers)}
    return all(count % size == 0 for count in heads)


class HeadShares:
    """Which K/V heads a process computes with, and which it keeps.

    It keeps all heads of the two layers that the hand-off reads, and of the others those that it computes with.

    Args:
        text: configuration of the verifier's text model.
    """

    def __init__(self, group: ProcessGroup, text: PreTrainedConfig) -> None:
        self._group = group
        self._parts = group.size if divides_heads(text, group.size) else 1
        self._read = frozenset(handoff_layers(text).values())

    def kept(self, layer: int, shape: KvShape) -> KvShape:
        """Shape of the K/V that are kept of a layer, whose whole shape is given."""
        return shape if layer in self._read else KvShape(shape.heads // self._parts, shape.dim)

    def gathered(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [1, N computed, R, d] of a pass -> K/V [1, N kept, R, d]."""
        if self._parts == 1 or layer not in self._read:
            return keys, values
        both = torch.cat(self._group.gather(torch.stack((keys, values))), dim=2)
        return both[0], both[1]

    def computed(self, layer: int, kept: torch.Tensor) -> torch.Tensor:
        """K or V [N kept, ...] of a layer -> a view [N computed, ...]."""
        if self._parts == 1 or layer not in self._read:
            return kept
        return kept.chunk(self._parts)[self._group.rank]
