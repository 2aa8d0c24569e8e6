"""What `plan` does: gather the inputs, simulate, print what to choose, write `plan.json`."""

from pathlib import Path

import msgspec

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.console import output, show_next
from hyco_export.cli.invocation import command_line
from hyco_export.core.device_profile import read_profile_file
from hyco_export.core.files import write_json
from hyco_export.errors import HycoError, ServerError
from hyco_export.evaluate.planning.choice import choice_line, make_plan, plan_table
from hyco_export.evaluate.planning.inputs import (
    PAPER,
    Inputs,
    LinkTimes,
    SystemInput,
    check_curve,
    paper_inputs,
    read_curve,
    read_link,
    read_parts,
    with_profile,
)
from hyco_export.evaluate.planning.measured import measured_inputs, read_folder
from hyco_export.evaluate.planning.simulation import Options
from hyco_export.evaluate.traces import PLAN_FILE, PROGRESS_FILE

CURVE_FIELD = "rows_ms"  # of /v1/info: points [rows, ms] that a server measured at its start


class Places(msgspec.Struct, frozen=True):
    """Where the parts come from, as the command line says; None: from the traces, or the paper."""

    traces: Path | None
    baseline: str | None
    files: tuple[Path, ...]
    device: str | None  # `paper`, or a profile.json
    link: str | None  # a preset, `paper`, or a CSV
    server: str | None  # `paper`, a file of the curve, or the URL of a server
    answer_tokens: int | None


def plan_run(places: Places, options: Options, connecting: ConnectOptions, out: Path) -> None:
    """Print the plan and write it.

    Raises:
        HycoError: a part that cannot be read, or does not fit the others; `out` among traces.
    """
    if (out.parent / PROGRESS_FILE).exists():
        raise HycoError(
            f"{out.parent} holds traces, whose own {PLAN_FILE} says how they were made", "give another --out"
        )
    plan = make_plan(gathered(places, connecting), options)
    output.print(plan_table(plan), crop=False)
    output.print()
    for choice in plan.choices:
        output.print(choice_line(choice), soft_wrap=True)
    output.print()
    for line in plan.assumed:
        output.print(f"assumed: {line}", style="dim", soft_wrap=True)
    write_json(out, plan)
    output.print(f"plan: {out}", soft_wrap=True)
    show_next(command_line("bench"))


def gathered(places: Places, connecting: ConnectOptions) -> Inputs:
    """The traces' inputs, or the paper's, with the parts that other places have.

    Raises:
        HycoError: as `plan_run`.
    """
    base = paper_inputs() if places.traces is None else measured_inputs(read_folder(places.traces), places.baseline)
    for file in places.files:
        base = msgspec.structs.replace(base, **read_parts(file))
    base = _with_device(base, places.device)
    if places.link is not None:
        base = with_link(base, read_link(places.link))
    base = _with_server(base, places.server, connecting)
    if places.answer_tokens is not None:
        workload = msgspec.structs.replace(base.workload, answer_tokens=places.answer_tokens)
        base = msgspec.structs.replace(base, workload=workload)
    if places.baseline is not None:
        base = msgspec.structs.replace(base, systems=_first(base, places.baseline))
    return base


def with_link(base: Inputs, link: LinkTimes) -> Inputs:
    """Over another link, where a time to the first token that was seen no longer holds."""
    if link == base.link:
        return base
    workload = msgspec.structs.replace(base.workload, first_token_ms=None)
    systems = {name: msgspec.structs.replace(one, first_token_ms=None) for name, one in base.systems.items()}
    return msgspec.structs.replace(base, link=link, workload=workload, systems=systems)


def _with_device(base: Inputs, place: str | None) -> Inputs:
    if place is None:
        return base
    if place == PAPER:
        return msgspec.structs.replace(base, device=paper_inputs().device)
    profile = read_profile_file(Path(place))
    note = f"head and SLM in the times of {profile.device}; what the host does beside each pass as without it"
    return msgspec.structs.replace(base, device=with_profile(base.device, profile), assumed=(*base.assumed, note))


def _with_server(base: Inputs, place: str | None, connecting: ConnectOptions) -> Inputs:
    if place is None:
        return base
    if place == PAPER:
        return msgspec.structs.replace(base, server=paper_inputs().server)
    online = place.startswith(("http://", "https://"))
    curve = _said_by_server(place, connecting) if online else read_curve(Path(place))
    note = f"passes of {place}; the head's steps and the prefill of the server as without it"
    server = msgspec.structs.replace(base.server, pass_ms=curve)
    return msgspec.structs.replace(base, server=server, assumed=(*base.assumed, note))


def _said_by_server(url: str, connecting: ConnectOptions) -> tuple[tuple[float, float], ...]:
    """The curve that a server publishes."""
    from hyco_export.cli.connection import transport_to

    try:
        transport, _ = transport_to(url, connecting, seed=0)
        points = getattr(transport.info(), CURVE_FIELD, None)
    except ServerError as error:
        raise HycoError(error.message, "start the server, or give --server-times a file") from error
    if not points:
        raise HycoError(f"{url} says nothing of the time its passes take", "give a file: JSON list of [rows, ms]")
    return check_curve(points, url)


def _first(base: Inputs, name: str) -> dict[str, SystemInput]:
    if name not in base.systems:
        raise HycoError(f"--baseline {name} is not among the systems", f"those are: {', '.join(base.systems)}")
    return {name: base.systems[name], **base.systems}
