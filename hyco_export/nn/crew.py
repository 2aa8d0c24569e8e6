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
from typing import Any, TypeVar

import torch
from torch import distributed

from hyco_export.errors import CrewError

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
        CrewError: another process is gone; so do `send` and `receive`.
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
        raise CrewError(
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
