"""What a validation found, as values, and its two files: `report.json` and the self-contained `report.html`.

The page's template is package data: `report.html.j2`.
"""

import math
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hyco_export.core.files import pretty_json, storage_error
from hyco_export.device.systems import find_system
from hyco_export.errors import HycoError, counted
from hyco_export.evaluate import pictures
from hyco_export.evaluate.backend_parity import GraphParity
from hyco_export.evaluate.charts import css_colors
from hyco_export.evaluate.diagnosis.finding import Diagnosis
from hyco_export.evaluate.gates import Gate, Losslessness, failed
from hyco_export.evaluate.metrics import SystemMetrics, SystemTraffic, headline
from hyco_export.evaluate.pictures import DrawnTree, RoundTimes
from hyco_export.protocol.wire import Sampling, ServerInfo

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

EARLIER_JSON_NAME, EARLIER_HTML_NAME = "earlier.json", "earlier.html"
JSON_NAME, HTML_NAME, TEMPLATE_NAME = "report.json", "report.html", "report.html.j2"
FINISHED = ("pass", "fail")  # verdicts of a validation that measured everything


class Report(msgspec.Struct, frozen=True):
    """Everything `validate` found."""

    run: str
    recipe: str
    target: str
    url: str
    started_at: str  # ISO 8601, UTC
    duration_s: float
    version: str
    server: ServerInfo
    sampling: Sampling
    epsilon: float
    max_new_tokens: int
    chain_acceptance: float  # what the drafting rule assumes per depth
    backend: str  # device back end of the sampled systems
    systems: tuple[SystemMetrics, ...]
    losslessness: tuple[Losslessness, ...]
    parity: tuple[GraphParity, ...]
    traffic: tuple[SystemTraffic, ...]
    diagnosis: Diagnosis
    gates: tuple[Gate, ...]
    times: tuple[RoundTimes, ...]
    tree: DrawnTree | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        return "pass" if all(gate.passed for gate in self.gates) and not self.diagnosis.findings else "fail"


class Unfinished(msgspec.Struct, frozen=True):
    """A validation without a verdict; it takes the report's place, so that no earlier report is read as this run's."""

    run: str
    recipe: str
    target: str
    url: str
    started_at: str  # ISO 8601, UTC
    version: str
    verdict: Literal["in progress", "interrupted", "could not run"] = "in progress"
    reason: str = ""
    next: str = ""  # the step that mends the reason, where one is known


@contextmanager
def unfinished_report(
    started: Unfinished, folder: Path, complete: Callable[[str], str] = lambda text: text
) -> Iterator[None]:
    """Write `started` to `folder`; if the block ends with an exception, replace it by the reason. Re-raises it.

    The last finished report is kept as earlier.json and earlier.html.

    Args:
        complete: adds this call's paths and options to the commands in a hint.
    """
    json_path, html_path = folder / JSON_NAME, folder / HTML_NAME
    if html_path.exists() and _verdict_in(json_path) in FINISHED:
        os.replace(json_path, folder / EARLIER_JSON_NAME)
        os.replace(html_path, folder / EARLIER_HTML_NAME)
    _write_unfinished(started, folder)
    try:
        yield
    except KeyboardInterrupt:
        _write_unfinished(msgspec.structs.replace(started, verdict="interrupted"), folder)
        raise
    except BaseException as error:
        reason, following = _reason_and_next(error)
        changed = {"verdict": "could not run", "reason": reason, "next": complete(following)}
        _write_unfinished(msgspec.structs.replace(started, **changed), folder)
        raise


def _reason_and_next(error: BaseException) -> tuple[str, str]:
    """What ended a validation, and the next step; an exception that is no HycoError is a fault of this program."""
    if isinstance(error, Exception) and not isinstance(error, HycoError):
        error = storage_error(error) or error  # a full disk is no fault of this program
    if isinstance(error, HycoError):
        return error.message, error.hint
    told = traceback.format_exception_only(error)[-1].strip()
    return f"a fault of hyco-export: {told}", "report it with the traceback in the terminal"


def _verdict_in(json_path: Path) -> str:
    """The verdict that a report's JSON holds; "" where there is no readable one."""
    try:
        return msgspec.json.decode(json_path.read_bytes(), type=_Verdict).verdict
    except (OSError, msgspec.DecodeError):
        return ""


class _Verdict(msgspec.Struct):
    verdict: str


def _write_unfinished(unfinished: Unfinished, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / JSON_NAME, pretty_json(unfinished))
    earlier = EARLIER_HTML_NAME if (folder / EARLIER_HTML_NAME).exists() else ""
    replace_file(folder / HTML_NAME, _render(unfinished=unfinished, report=unfinished, earlier=earlier).encode())


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into `folder`; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"verdict": report.verdict, **msgspec.to_builtins(report)}
    content["gates"] = [{**msgspec.to_builtins(gate), "passed": gate.passed} for gate in report.gates]
    content["diagnosis"]["findings"] = [
        {**msgspec.to_builtins(finding), "means": finding.means} for finding in report.diagnosis.findings
    ]
    json_path, html_path = folder / JSON_NAME, folder / HTML_NAME
    replace_file(json_path, pretty_json(content))
    replace_file(html_path, render_html(report).encode())
    return json_path, html_path


def render_html(report: Report) -> str:
    """The page: no scripts, no external files, light and dark by the reader's setting."""
    return _render(
        report=report,
        unfinished=None,
        failures=failed(report.gates),
        notes=(*report.notes, *report.diagnosis.notes),
        facts=key_facts(report),
        baseline=report.systems[0],
        meanings={system.system: find_system(system.system).summary for system in report.systems},
        **_pictures(report),
    )


def _render(**values: object) -> str:
    return page_template(Path(__file__).parent, TEMPLATE_NAME).render(**values)


def page_template(folder: Path, name: str) -> "Template":
    """A page's template, which includes others below `folder`: text is escaped, an unknown name is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment.get_template(name)


def _code(text: object) -> "Markup":
    """Escaped text, with what stands between backticks in the page's code font."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(str(text)))))  # escaped right here


def _pictures(report: Report) -> dict[str, object]:
    """SVG text and legends by the names the template uses."""
    drafting = [system for system in report.systems if system.chain_acceptance]
    return {
        "sources": pictures.tokens_by_source(report.systems),
        "acceptance": pictures.acceptance_by_depth(drafting, report.chain_acceptance) if drafting else "",
        "timeline": pictures.round_timeline(report.times) if report.times else "",
        "tree": pictures.draft_tree(report.tree) if report.tree else "",
        "source_legend": css_colors(pictures.SOURCE_COLORS),
        "phase_legend": css_colors(pictures.PHASE_COLORS),
        "node_legend": css_colors(pictures.SOURCE_COLORS),
    }


def key_facts(report: Report) -> list[dict[str, str]]:
    """The page's headline figures: name, value, detail."""
    baseline = report.systems[0]
    shown = headline([system.system for system in report.systems if system.rounds])
    best = next(system for system in report.systems if system.system == shown)
    change = 100 * (best.server_ms_per_token / baseline.server_ms_per_token - 1)
    backends = len({row.backend for row in report.losslessness})
    greedy = len({row.system for row in report.losslessness})
    texts = sum(row.prompts for row in report.losslessness)
    equal = texts - sum(len(row.differences) for row in report.losslessness)
    largest = max(row.up_max_bytes for row in report.traffic)
    return [
        _fact("tokens per round", f"{best.mat:.2f}", f"{best.system}; {baseline.system} {baseline.mat:.2f}"),
        _fact(
            "server time per token",
            "not measured" if math.isnan(change) else f"{change:+.0f} %".replace("-", "\N{MINUS SIGN}"),
            f"{best.system} against {baseline.system}",
        ),
        _fact(
            "greedy texts equal",
            f"{equal} of {texts}",
            f"{counted(greedy, 'system')} on {counted(backends, 'back end')}",
        ),
        _fact("largest request", f"{largest} B", "body of a verify round"),
    ]


def _fact(name: str, value: str, detail: str) -> dict[str, str]:
    return {"name": name, "value": value, "detail": detail}


def replace_file(path: Path, content: bytes) -> None:
    """Write beside `path`, then rename over it; a failure leaves nothing behind.

    Raises:
        OSError: about `path`, whichever of the two was refused.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):  # never made, or on a disk that is gone
            partial.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
