"""What `server_ms` is measured with on a GPU."""

import torch

from hyco_export.runtime.clocks import Clock, ProcessCpuClock, ThreadCpuClock


class CudaClock:
    """CUDA events on the current stream of `device`, from the first kernel's launch to the last one's end."""

    name = "cuda-events"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> torch.cuda.Event:
        return self._record()

    def elapsed_ms(self, mark: torch.cuda.Event) -> float:
        end = self._record()
        end.synchronize()
        return float(mark.elapsed_time(end))

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_for(device: torch.device, threads: int) -> Clock:
    """The clock that sees all the work of a model on this device, where torch computes with this many CPU threads."""
    if device.type == "cuda":
        return CudaClock(device)
    return ThreadCpuClock() if threads == 1 else ProcessCpuClock()
