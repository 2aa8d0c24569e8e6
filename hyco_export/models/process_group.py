"""The processes of one launch (`accelerate launch -m hyco_export ...`): which one this is, what it computes on, and how
they work together. A plain start is a crew of one.

Knows accelerate and torch.distributed; not what is computed. The main process (rank 0) alone plans, prints, locks and
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
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hyco_export.core.handoff import KvShape
from hyco_export.core.recipe import Dtype
from hyco_export.errors import ProcessGroupError
from hyco_export.models.verifier import handoff_layers, layer_kv_shape, load_config, load_shard

Item = TypeVar("Item")
LINE_PATIENCE = timedelta(days=3650)  # of a process that waits for its next task: a server may be idle for long
PATIENCE = timedelta(
    days=7
)  # of a process that waits: the others may compile or capture for days; a dead one is noticed
WORLD_SIZE = "WORLD_SIZE"  # set by the launcher
FAILURES_KEY = "hyco-export/failures"


class Crew:
    """The processes of a launch as one of them sees it.

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
        """transformers' `device_map` for one model: all GPUs for a process on its own, else this process's device."""
        return "auto" if self.size == 1 and self.device.type == "cuda" else str(self.device)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Every `size`-th item, beginning with this process's number."""
        return list(items[self.rank :: self.size])

    def tell(self, message: Any = None) -> Any:
        """The main process's message, in every process."""
        if self.size == 1:
            return message
        box = [message]
        with _lost_processes():
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self.size > 1:
            with _lost_processes():
                distributed.barrier()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every process's tensor of the same shape, in the order of their numbers; on `device`."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _lost_processes():
            distributed.all_gather(found, tensor.contiguous())
        return found


class Line:
    """Bytes from the main process to all others, through the CPU: who waits for them keeps no GPU busy. Every process
    of the crew opens it at the same time.

    Raises:
        ProcessGroupError: another process is gone; so do `send` and `receive`.
    """

    def __init__(self) -> None:
        with _lost_processes():
            group = distributed.new_group(backend="gloo", timeout=LINE_PATIENCE)
        assert isinstance(group, distributed.ProcessGroup)  # this process is in it
        self._group = group

    def send(self, message: bytes) -> None:
        """Only in the main process."""
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


ALONE = Crew(0, 1, torch.device("cpu"))


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
def current_crew() -> Crew:
    """The crew of this launch; joins the other processes on the first call."""
    from accelerate import PartialState

    # without GPUs accelerate joins the processes only when it is told to use the CPU
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    launched = int(os.environ.get(WORLD_SIZE, "1")) > 1
    state = PartialState(cpu=on_cpu, **({"timeout": PATIENCE} if launched else {}))
    device = torch.device("cpu") if state.device.type == "cpu" else state.device
    return Crew(state.process_index, state.num_processes, device)


def first_to_fail() -> bool:
    """True in one process of a launch only: the first to ask. It tells the user; the others end in silence."""
    if int(os.environ.get(WORLD_SIZE, "1")) == 1:
        return True
    try:
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
        )
        return store.add(FAILURES_KEY, 1) == 1
    except (KeyError, ValueError, distributed.DistError):
        return False  # the launcher's store is gone: the process that ended first has spoken


# A verifier in shards, one a process: what transformers' tensor parallelism divides, and who holds which K/V heads.


ATTENTION, EXPERTS = ".self_attn.", ".experts"  # in the names of transformers' plan
WHOLE = "replicate"  # its word for what every process holds all of
TABLE, OUTPUT = "embed_tokens", "lm_head"


def load_sharded_verifier(folder: Path, dtype: Dtype, crew: Crew) -> tuple[PreTrainedModel, "HeadShares"]:
    """This process's shard on the process's device, as `nn.verifier.load_verifier` gives the whole, and its heads. All
    processes of the launch load at the same time.

    Raises:
        CheckpointError: as `load_verifier`.
    """
    config, distributed = _divided(load_config(folder), crew.size)
    model = load_shard(folder, dtype, config, distributed)
    return model, HeadShares(crew, model.config.get_text_config())


def _divided(config: PreTrainedConfig, size: int) -> tuple[PreTrainedConfig, DistributedConfig]:
    """The configuration with transformers' plan for this many processes, and what the model's class adds to it."""
    text = config.get_text_config()
    divided = {ATTENTION: divides_heads(text, size), EXPERTS: text.enable_moe_block}
    whole = [part for part, is_divided in divided.items() if not is_divided]
    rules = text.base_model_tp_plan or {}
    plan = {rule: style for rule, style in rules.items() if not any(part in rule for part in whole)}
    text.update({"base_model_tp_plan": plan | {TABLE: WHOLE}})
    return config, DistributedConfig(tp_size=size, tp_plan={OUTPUT: WHOLE})


def divides_heads(text: PreTrainedConfig, size: int) -> bool:
    """Can the attention heads of every layer be divided among so many processes?"""
    heads = {text.num_attention_heads} | {layer_kv_shape(text, index).heads for index in range(text.num_hidden_layers)}
    return all(count % size == 0 for count in heads)


class HeadShares:
    """Which K/V heads a process computes with, and which it keeps: of the two layers that something beside the verifier
    reads all of them, of the others its own.

    Args:
        text: configuration of the verifier's text model.
    """

    def __init__(self, crew: Crew, text: PreTrainedConfig) -> None:
        self._crew = crew
        self._parts = crew.size if divides_heads(text, crew.size) else 1
        self._read = frozenset(handoff_layers(text).values())

    def kept(self, layer: int, shape: KvShape) -> KvShape:
        """What is kept of a layer's K/V."""
        return shape if layer in self._read else KvShape(shape.heads // self._parts, shape.dim)

    def gathered(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V [1, N computed, R, d] of a pass -> those of the heads that are kept."""
        if self._parts == 1 or layer not in self._read:
            return keys, values
        both = torch.cat(self._crew.gather(torch.stack((keys, values))), dim=2)
        return both[0], both[1]

    def computed(self, layer: int, kept: torch.Tensor) -> torch.Tensor:
        """Of K or V [N kept, ...] of a layer those of the heads that this process computes with: a view."""
        if self._parts == 1 or layer not in self._read:
            return kept
        return kept.chunk(self._parts)[self._crew.rank]
