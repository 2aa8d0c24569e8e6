"""What a plan says: figures of every system, which one to choose for which aim, and what was assumed."""

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from hyco_export.evaluate.planning.inputs import Inputs
from hyco_export.evaluate.planning.simulation import Options, Outcome, simulate
from hyco_export.evaluate.summary import number, plain_table

UNDECIDED = 0.02  # HyCo, §3: smaller differences of g were run-to-run variation
SIMULATED = (
    "rounds are independent: every depth is taken with its share, whatever came before",
    "TCP's slow start and outages are left out",
    "the server does not wait for calls that could share a pass",
    "device times do not grow with heat or use",
)
NO_STREAM = (
    "the device asks for every round of cloud-mtp, as this package's does; a server that streams delivers faster"
)


class Aim(msgspec.Struct, frozen=True):
    """What somebody may want most of."""

    name: str
    what: str
    unit: str
    value: Callable[[Outcome], float]
    most: bool = False  # is more of it better


AIMS = (
    Aim("g", "least server time", "server ms per token", lambda one: one.server_ms_per_token),
    Aim("delivery", "fastest text", "tokens per s", lambda one: one.tokens_per_s, most=True),
    Aim("bytes", "least traffic", "bytes per token", lambda one: one.bytes_per_token),
    Aim("battery", "least drafting", "draft ms per token", lambda one: one.draft_ms_per_token),
)


class Choice(msgspec.Struct, frozen=True):
    """The best system for an aim, of all or of those that draft on the device. `margin`: by which share it beats the
    next; None where there is none."""

    aim: str
    system: str
    value: float
    unit: str
    next_system: str | None
    next_value: float | None
    margin: float | None
    drafting: bool = False  # of those that draft on the device alone

    @property
    def decided(self) -> bool:
        """Is the margin more than runs of one setting differ."""
        return self.margin is None or self.margin >= UNDECIDED


class Plan(msgspec.Struct, frozen=True):
    """`plan.json`. The first outcome is the baseline's."""

    outcomes: tuple[Outcome, ...]
    choices: tuple[Choice, ...]
    assumed: tuple[str, ...]
    options: Options
    inputs: Inputs


def make_plan(inputs: Inputs, options: Options) -> Plan:
    """Simulate all systems and choose. Raises as `simulation.Simulation`."""
    outcomes = simulate(inputs, options)
    notes = [NO_STREAM] if "cloud-mtp" in inputs.systems else []
    if options.clients > 1:
        most = min(options.clients, options.batch) * (inputs.budget + 1)
        notes.append(f"all {options.clients} clients run the same system")
        if most > inputs.server.pass_ms[-1][0]:
            notes.append(
                f"passes of up to {most} rows go on as the last points of the server's curve do: none was seen"
            )
    choices = tuple(choice for aim in AIMS for choice in choices_for(aim, outcomes))
    return Plan(outcomes, choices, (*inputs.assumed, *notes, *SIMULATED), options, inputs)


def choices_for(aim: Aim, outcomes: Sequence[Outcome]) -> tuple[Choice, ...]:
    """The best of all; where that drafts nothing on the device, also the best of those that do."""
    best = choose(aim, outcomes)
    drafting = [one for one in outcomes if one.draft_ms_per_token]
    if not drafting or best.system in {one.system for one in drafting}:
        return (best,)
    return best, msgspec.structs.replace(choose(aim, drafting), drafting=True)


def choose(aim: Aim, outcomes: Sequence[Outcome]) -> Choice:
    """The best of them for one aim; of equals the first."""
    ranked = sorted(outcomes, key=aim.value, reverse=aim.most)
    best, value = ranked[0], aim.value(ranked[0])
    if len(ranked) == 1:
        return Choice(aim.name, best.system, value, aim.unit, None, None, None)
    other = aim.value(ranked[1])
    margin = abs(value - other) / other if other else 0.0
    return Choice(aim.name, best.system, value, aim.unit, ranked[1].system, other, margin)


def change(outcome: Outcome, baseline: Outcome) -> float:
    """Of g against the baseline's, as a share."""
    return outcome.server_ms_per_token / baseline.server_ms_per_token - 1


def plan_table(plan: Plan) -> Table:
    """One line a system."""
    count = plan.options.clients
    table = plain_table(f"{count} client{'s' if count > 1 else ''} on one server, link {plan.inputs.link.name}")
    table.add_column("system", no_wrap=True)
    headings = ("MAT", "server ms\nper token", "tok/s", "draft ms\nper token", "B a token", "TTFT\nms", "server\nbusy")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.outcomes:
        beside = "" if row is plan.outcomes[0] else f" ({change(row, plan.outcomes[0]):+.1%})"
        table.add_row(
            row.system,
            number(row.mat, 2),
            number(row.server_ms_per_token, 2) + beside,
            number(row.tokens_per_s, 1),
            number(row.draft_ms_per_token, 1),
            f"{row.bytes_per_token:,.0f}",
            number(row.first_token_ms, 0),
            f"{row.server_busy:.0%}",
        )
    return table


def choice_line(choice: Choice) -> str:
    """For the terminal."""
    aim = next(aim for aim in AIMS if aim.name == choice.aim)
    among = ", of those that draft on the device" if choice.drafting else ""
    line = f"{aim.what}{among}: {choice.system}, {choice.value:,.4g} {choice.unit}"
    if choice.margin is None or choice.next_value is None:
        return line
    beside = f"next {choice.next_system}, {choice.next_value:,.4g}"
    doubt = "" if choice.decided else ", too near to tell"
    return f"{line} ({beside}; ahead by {choice.margin:.1%}{doubt})"
