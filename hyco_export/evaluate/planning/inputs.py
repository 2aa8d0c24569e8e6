"""What a plan is made from: device, link, server, workload and systems, each readable from a file of its own.

An inputs file (YAML or JSON) holds any of the sections of `Inputs`; docs/measuring.md shows one. The paper's figures
ship as `paper.yaml`, and what differs on long prompts as `paper-32k.yaml`. A link is also read from CSV
(`from_s,rtt_ms,down_mbit_s,up_mbit_s`), a server's curve from a list of [rows, ms] in JSON or from CSV (`rows,ms`).
"""

import csv
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hyco_export.core.device_profile import DeviceProfile
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH
from hyco_export.core.numerics import MS_PER_S, along
from hyco_export.core.recipe_loading import read_yaml
from hyco_export.core.recipe_sections import Count, NonNegative, Section, Share
from hyco_export.device.link import PRESETS, Link, find_link
from hyco_export.device.systems import SYSTEMS, System
from hyco_export.errors import HycoError, RecipeError

PAPER, PAPER_32K = "paper", "paper-32k"
SHIPPED = {name: Path(__file__).parent / f"{name}.yaml" for name in (PAPER, PAPER_32K)}
Part = TypeVar("Part")
LINK_COLUMNS = ("from_s", "rtt_ms", "down_mbit_s", "up_mbit_s")
INPUTS_HINT = "`inputs` in the plan.json that `hyco-export plan` writes shows the form of every section"
LINK_HINT = "give times of 0 or more, up to an hour for rtt_ms, and bandwidths above 0, up to 1,000,000 Mbit/s"
CURVE_HINT = "give a list of [rows, ms], sorted by rows"
MOST_MS = 3_600_000.0  # an hour, the most that a pass or a round trip may take
LEAST_MBIT_S, MOST_MBIT_S = 1e-6, 1e6  # 1 bit and 1 Tbit a second
MOST_S = 31_536_000.0  # a year of a link
CURVE_COLUMNS = ("rows", "ms")
Milliseconds = Annotated[float, Meta(ge=0.0, le=MOST_MS)]
Rows = Annotated[float, Meta(gt=0.0, le=1e6)]
PassMilliseconds = Annotated[float, Meta(gt=0.0, le=MOST_MS)]
Bandwidth = Annotated[float, Meta(ge=LEAST_MBIT_S, le=MOST_MBIT_S)]


class DeviceTimes(Section, frozen=True):
    """Milliseconds on the device. A proposal takes the head's K steps and, for every SLM pass, graph and host."""

    head_ms: Milliseconds
    slm_pass_ms: Milliseconds  # one pass of the graph
    host_ms: Milliseconds = 0.0  # beside every pass: tables, best columns, scores, the cut to the budget
    commit_ms: Milliseconds = 0.0  # after a verdict
    prefill_ms: Milliseconds = 0.0  # after the first token
    looks_between_passes: bool = True  # drafting ahead ends with the pass in which the reply comes; False: at its end


class ServerTimes(Section, frozen=True):
    """Milliseconds on the server; `pass_ms` are points [rows, ms] of one verification pass, by increasing rows.

    `beside_ms`: such points of what a call waits beyond pass and link, for host work or a busy machine; no part of g.
    """

    pass_ms: Annotated[tuple[tuple[Rows, PassMilliseconds], ...], Meta(min_length=1)]
    beside_ms: tuple[tuple[Rows, Milliseconds], ...] = ()
    head_ms: Milliseconds = 0.0  # K steps of the verifier's own head, once for a batch
    prefill_ms: Milliseconds = 0.0  # one prompt

    def verify_ms(self, rows: float) -> float:
        """A pass of so many rows: linear between the points and, along the last two, beyond them."""
        return along(self.pass_ms, rows)

    def late_ms(self, rows: float) -> float:
        """`beside_ms` in the same way."""
        return along(self.beside_ms, rows) if self.beside_ms else 0.0


class LinkPoint(Section, frozen=True, kw_only=True):
    """What the link is like from a time on; None: the bandwidth takes no time."""

    from_s: Annotated[float, Meta(ge=0.0, le=MOST_S)] = 0.0
    rtt_ms: Milliseconds
    down_mbit_s: Bandwidth | None = None
    up_mbit_s: Bandwidth | None = None


class LinkTimes(Section, frozen=True):
    """A link over time. Behind the last point, held as long as the one before, it starts anew."""

    name: str
    points: Annotated[tuple[LinkPoint, ...], Meta(min_length=1)]
    jitter_ms: Milliseconds = 0.0  # as in device.link.Link, like loss
    loss: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0

    def at(self, now_ms: float) -> int:
        """Number of the point that holds at a time."""
        starts = [point.from_s for point in self.points]
        if len(starts) == 1:
            return 0
        period_s = 2 * starts[-1] - starts[-2]
        return max(0, bisect_right(starts, now_ms / MS_PER_S % period_s) - 1)

    def links(self) -> tuple[Link, ...]:
        """Each point as a link that stays as it is."""
        free = float("inf")
        return tuple(
            Link(self.name, p.rtt_ms, self.jitter_ms, p.down_mbit_s or free, p.up_mbit_s or free, self.loss)
            for p in self.points
        )


class Workload(Section, frozen=True):
    """What is asked for. `first_token_ms`: seen with one client; None: computed from link, prefill and bytes."""

    answer_tokens: Annotated[int, Meta(ge=2)]
    first_token_ms: Milliseconds | None = None


class SystemInput(Section, frozen=True):
    """One system: how much of its drafts is taken, and its bytes.

    `acceptance`: for depth 1, 2, ... the share of the rounds that reached it which took a node there, by its source.
    Or `mat` alone: then every depth that the system can reach has the same share. Rows and passes follow from the
    system's name (`shape_of`) unless they are given.
    """

    acceptance: tuple[dict[str, Share], ...] = ()
    mat: Annotated[float, Meta(ge=1.0)] | None = None
    rows: Count | None = None
    passes: NonNegative | None = None
    up_bytes: NonNegative = 0  # a round
    down_bytes: NonNegative = 0  # a round ...
    down_bytes_per_token: Annotated[float, Meta(ge=0.0)] = 0.0  # ... and so many more for a committed token
    first_up_bytes: NonNegative = 0
    first_down_bytes: NonNegative = 0
    first_token_ms: Milliseconds | None = None  # instead of the workload's


class Inputs(Section, frozen=True):
    """Everything that a simulation reads; `assumed` says in words what nobody measured."""

    device: DeviceTimes
    link: LinkTimes
    server: ServerTimes
    workload: Workload
    systems: dict[str, SystemInput]  # the first is the baseline
    budget: Count = 32  # nodes of a tree
    steps: Count = 4  # K
    assumed: tuple[str, ...] = ()


class Shape(msgspec.Struct, frozen=True):
    """The work of one round of a system. `deepest`: nodes on its longest path."""

    rows: int  # of the verification pass, the root counted
    passes: int  # of the SLM
    deepest: int
    device_head: bool
    server_head: bool
    head_at_prime: bool  # the server's first chain comes with PRIME's reply
    ahead: bool  # drafts on while the reply is on its way


PASSES = {"nothing": 0, "hybrid": 1, "hybrid-2p": 2, "reply-chain": 1, "specedge": 4, "specedge-pd": 4}
PROACTIVE = "specedge-pd"


def shape_of(name: str, given: SystemInput, budget: int, steps: int) -> Shape:
    """The work that a system's name stands for, with what `given` says otherwise.

    Raises:
        HycoError: no such system, or one whose rounds are of another kind.
    """
    known = [row.name for row in SYSTEMS.values() if plannable(row)]
    if name not in known:
        raise HycoError(f"system {name!r} cannot be planned", f"known ones: {', '.join(known)}")
    system = SYSTEMS[name]
    passes = PASSES[system.drafter] if given.passes is None else given.passes
    server_head = system.draft_side != "device"
    chain = steps if system.needs_handoff or server_head else 0
    rows = 1 + (budget if system.needs_device else chain)
    ahead = system.drafter == PROACTIVE
    deepest = chain + passes * (2 if ahead else 1)
    at_prime = system.draft_side == "reply"
    return Shape(given.rows or rows, passes, deepest, system.needs_handoff, server_head, at_prime, ahead)


def plannable(system: System) -> bool:
    """Does it ask a verifier for every token, with a drafter whose passes are known."""
    return system.verifies_all and system.drafter in PASSES


def acceptance_of(given: SystemInput, shape: Shape) -> tuple[dict[str, float], ...]:
    """By depth; where only MAT is given, the share s with 1 + s + ... + s^deepest = MAT, of no source.

    Raises:
        HycoError: neither is given, shares of a depth above 1, or a MAT that no such tree can have.
    """
    if given.acceptance:
        if any(sum(shares.values()) > 1.0 + 1e-9 for shares in given.acceptance):
            raise HycoError("acceptance: the shares of a depth are more than 1", "count each round once")
        return given.acceptance
    if given.mat is None:
        raise HycoError("a system has neither `acceptance` nor `mat`", "give one of them")
    if given.mat > shape.deepest + 1:
        raise HycoError(
            f"mat is {given.mat}, a tree of depth {shape.deepest} commits {shape.deepest + 1} tokens at most",
            "correct mat, or give `passes`",
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: beyond float64
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(shape.deepest + 1)) < given.mat else (low, middle)
    return ({"any": low},) * shape.deepest


def read_parts(path: Path) -> dict[str, Any]:
    """The sections of an inputs file, or of one that ships, by name.

    Raises:
        HycoError: it cannot be read, or holds something else.
    """
    values = read_values(SHIPPED.get(str(path), path))
    if not isinstance(values, dict) or not values:
        raise HycoError(f"{path} holds no section", f"known ones: {', '.join(Inputs.__struct_fields__)}")
    kinds = msgspec.structs.fields(Inputs)
    known = {field.name: field.type for field in kinds}
    for name in values:
        if name not in known:
            raise HycoError(f"{path}: unknown section {name!r}", f"known ones: {', '.join(known)}")
    return {name: _converted(value, known[name], f"{path}: {name}", INPUTS_HINT) for name, value in values.items()}


def paper_inputs() -> Inputs:
    """The paper's figures for Spec-Bench."""
    return Inputs(**read_parts(SHIPPED[PAPER]))


def read_link(name: str) -> LinkTimes:
    """A preset's name, `paper`, or a CSV file.

    Raises:
        HycoError: none of them, or a file that is not such a table.
    """
    if name == PAPER:
        return paper_inputs().link
    if not name.endswith(".csv"):
        if name not in PRESETS and Path(name).exists():
            raise HycoError(f"--link {name} is no CSV file", "give a preset or a CSV; other sections go with --inputs")
        link = find_link(name)
        point = LinkPoint(rtt_ms=link.rtt_ms, down_mbit_s=link.down_mbit_s, up_mbit_s=link.up_mbit_s)
        return LinkTimes(name=link.name, points=(point,), jitter_ms=link.jitter_ms, loss=link.loss)
    rows = _csv(Path(name), LINK_COLUMNS)
    points = [dict(zip(LINK_COLUMNS, row, strict=True)) for row in rows]
    starts = [row[0] for row in rows]
    if starts[0] != 0.0 or sorted(set(starts)) != starts:
        raise HycoError(f"{name}: from_s must start with 0 and grow", "sort the lines")
    series: LinkTimes = _converted({"name": name, "points": points}, LinkTimes, name, LINK_HINT)
    return series


def read_curve(path: Path) -> tuple[tuple[float, float], ...]:
    """Points [rows, ms] by increasing rows.

    Raises:
        HycoError: no such file, or something else in it.
    """
    rows = _csv(path, CURVE_COLUMNS) if path.suffix == ".csv" else read_values(path)
    points = _converted(rows, tuple[tuple[Rows, PassMilliseconds], ...], str(path), CURVE_HINT)
    return check_curve(points, str(path))


def check_curve(points: Sequence[Sequence[float]], where: str) -> tuple[tuple[float, float], ...]:
    """The same points.

    Raises:
        HycoError: none, or rows that do not grow.
    """
    at = [rows for rows, _ in points]
    if not at or sorted(set(at)) != at:
        raise HycoError(f"{where}: rows must grow from point to point", CURVE_HINT)
    return tuple((float(rows), float(ms)) for rows, ms in points)


def with_profile(device: DeviceTimes, profile: DeviceProfile) -> DeviceTimes:
    """The graphs' times of a phone; the host's stay.

    Raises:
        ArtifactError: it lacks a graph.
    """
    head_ms, slm_pass_ms = profile.pass_ms(HEAD_GRAPH), profile.pass_ms(SLM_TREE_GRAPH)
    return msgspec.structs.replace(device, head_ms=head_ms, slm_pass_ms=slm_pass_ms)


def read_values(path: Path) -> Any:
    """Plain values of a YAML file; JSON is YAML.

    Raises:
        HycoError: no such file, or not YAML.
    """
    if not path.is_file():
        raise HycoError(f"{path} is not a file", "correct the path")
    try:
        return read_yaml(path)
    except RecipeError as error:
        raise HycoError(error.message.removeprefix("recipe "), error.hint) from error


def _csv(path: Path, columns: Sequence[str]) -> list[list[float]]:
    """Numbers of these columns; the first line names them."""
    wanted = ",".join(columns)
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [[float(row[column]) for column in columns] for row in csv.DictReader(stream)]
    except OSError as error:
        raise HycoError(f"{path} cannot be read: {error.strerror}", "correct the path") from error
    except (KeyError, TypeError, ValueError) as error:
        raise HycoError(f"{path} is no table of {wanted}: {error}", "name the columns in its first line") from error
    if not rows:
        raise HycoError(f"{path} has no line below its first", f"give at least one of {wanted}")
    return rows


def _converted(value: Any, kind: Any, where: str, hint: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise HycoError(f"{where}: {error}", hint) from error
