"""Runs independent trainings side by side, one process and one thread each, and forwards their progress.

The processes are spawned, so a script that gets here must guard its main part with `if __name__ == "__main__"`.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from hyco_export.errors import HycoError

Report = Callable[[float], None]
"""Told the share done, 0 to 1."""

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A module-level function and its arguments; it is called with one more, a `Report`."""

REPORT_EVERY_S = 1.0


def run_side_by_side(
    jobs: Mapping[str, Job], on_progress: Callable[[str, float], None]
) -> tuple[dict[str, Any], float]:
    """Results by job name, and the CPU-seconds of all jobs together."""
    context = multiprocessing.get_context("spawn")
    names: dict[Connection, str] = {}
    processes = []
    for name, (function, arguments) in jobs.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(sender, function, arguments), name=name)
        process.start()
        sender.close()
        names[receiver] = name
        processes.append(process)
    try:
        results, cpu_seconds = _collect(names, on_progress)
        return {name: results[name] for name in jobs}, cpu_seconds
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _collect(names: dict[Connection, str], on_progress: Callable[[str, float], None]) -> tuple[dict[str, Any], float]:
    results: dict[str, Any] = {}
    cpu_seconds = 0.0
    while len(results) < len(names):
        for connection in wait([connection for connection, name in names.items() if name not in results]):
            name = names[connection]  # type: ignore[index]
            kind, value = _receive(connection, name)
            if kind == "progress":
                on_progress(name, value)
            elif kind == "result":
                results[name], seconds = value
                cpu_seconds += seconds
            else:
                raise HycoError(f"the training of the {name} failed: {value}", "see the traceback in the message")
    return results, cpu_seconds


def _receive(connection: Any, name: str) -> tuple[str, Any]:
    try:
        return connection.recv()
    except EOFError:
        raise HycoError(f"the process that trains the {name} ended early", "look for a lack of memory") from None


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Body of a spawned process: one thread, progress at most once a second, then the result or the traceback."""
    import torch

    torch.set_num_threads(1)
    last_report_s = 0.0

    def report(share: float) -> None:
        nonlocal last_report_s
        if share >= 1.0 or time.monotonic() - last_report_s > REPORT_EVERY_S:
            last_report_s = time.monotonic()
            sender.send(("progress", share))

    try:
        result = function(*arguments, report)
    except BaseException:
        sender.send(("error", traceback.format_exc()))
        raise
    sender.send(("result", (result, time.process_time())))
