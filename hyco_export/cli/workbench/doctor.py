"""What `doctor` and `explain` do: checks of the machine, of a run folder and of a server, as a table or JSON; cause and
cure of an error text or code of the NPU's libraries, from the table of `graph.qnn_errors`."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.connection import ConnectOptions, transport_to
from hyco_export.cli.console import output, say
from hyco_export.cli.options import open_run
from hyco_export.errors import counted
from hyco_export.graph.qnn_errors import TRAPS, find_known
from hyco_export.workbench.doctor import Check, examine_machine, examine_run, examine_server

if TYPE_CHECKING:
    from hyco_export.device.interfaces import Transport

MARKS = {"fine": "fine", "note": "note", "blocked": "BLOCKED"}
BLOCKED = 1  # exit code
THE_GRAPH = "the graph"


def run_doctor(
    recipe_path: Path | None, run_dir: Path | None, server: str | None, reach: ConnectOptions, as_json: bool
) -> int:
    """Print every check; 1 where something is blocked, else 0.

    Raises:
        HycoError: the recipe cannot be read, or the server's options cannot be used.
    """
    output.quiet = as_json
    run = open_run(recipe_path, run_dir)
    output.quiet = False

    def connect() -> "Transport":
        return transport_to(str(server), reach, run.recipe.validation.seed)[0]

    checks = [*examine_machine(run.root), *examine_run(run), *(examine_server(server, connect) if server else [])]
    if as_json:
        output.print_json(msgspec.json.encode(checks).decode())
    else:
        _show(checks)
    return BLOCKED if any(check.state == "blocked" for check in checks) else 0


def _show(checks: list[Check]) -> None:
    from hyco_export.evaluate.summary import WholeTable

    for group in dict.fromkeys(check.group for check in checks):
        table = WholeTable(f"\n{group}", show_header=False)
        for no_wrap in (True, True, False):
            table.add_column("", no_wrap=no_wrap)
        for check in checks:
            if check.group == group:
                table.add_row(check.name, MARKS[check.state], check.found)
        output.print(table, crop=False)
    wanting = [check for check in checks if check.state != "fine"]
    if wanting:
        output.print("")
    for check in wanting:
        verb = "blocks" if check.state == "blocked" else "without it"
        output.print(f"{check.name}: {verb}: {check.blocks}", soft_wrap=True)
        say(f"  next: {check.next}")
    blocked = sum(check.state == "blocked" for check in checks)
    output.print(f"\n{counted(len(checks), 'check')}, {blocked} blocked", soft_wrap=True)


def explain_text(text: str) -> int:
    """Print what is known; 0 where something is, else 1 and what fails without any error."""
    known = find_known(text)
    if known is not None:
        say(f"seen at: {known.where}")
        say(f"cause: {known.message.format(subject=THE_GRAPH)}")
        say(f"next: {known.hint}")
        return 0
    output.print(f"{text!r} is in no entry of the table; what goes wrong without an error:")
    for trap in TRAPS:
        output.print(f"\n{trap.symptom}\n  cause: {trap.cause}", soft_wrap=True)
        say(f"  next: {trap.cure}")
    return 1
