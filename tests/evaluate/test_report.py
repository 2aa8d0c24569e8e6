"""The report's two files."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console
from synthetic_reports import SWAPPED_NORM, synthetic_report
from synthetic_run import KEEPSET
from synthetic_traces import generation, local_trace, round_trace

from hyco_export.evaluate.examples import pick_tree
from hyco_export.evaluate.metrics import measure
from hyco_export.evaluate.report import render_html, write_report
from hyco_export.evaluate.summary import summary


@pytest.fixture(scope="module")
def page():
    return render_html(synthetic_report())


@pytest.fixture(scope="module")
def failing_page():
    return render_html(synthetic_report(failing=True))


def test_the_page_needs_no_other_file_and_no_script(page):
    assert not re.search(r"<script|<link|<img|@import|url\(http|src=", page)
    # an xmlns is a name and the server's address is text; nothing else may point elsewhere
    assert set(re.findall(r'(?:href|xlink:href)="([^#"][^"]*)"', page)) == set()


def test_all_four_pictures_are_inline(page):
    assert page.count("<svg") == page.count("</svg>") == 4
    for caption in ("Who proposed the tokens", "by depth", "Where a round's time goes", "One drawn tree"):
        assert caption in page


def test_pictures_use_the_pages_colours_and_font(page):
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert not re.search(r"#0[0-9a-f]010\d|DejaVu", drawings)
    assert {"var(--ink)", "var(--series-1)", "var(--series-4)", "var(--font)"} <= set(
        re.findall(r"var\(--[a-z0-9-]+\)", drawings)
    )
    declared = set(re.findall(r"(--[a-z0-9-]+):", page))
    assert {name[4:-1] for name in re.findall(r"var\(--[a-z0-9-]+\)", page)} <= declared


def test_text_of_tokens_cannot_become_markup():
    report = synthetic_report()
    trace = generation(round_trace((0,)), prompt_id="<b>x</b>")
    tree = pick_tree([trace], lambda token: "<i>&")
    page = render_html(msgspec.structs.replace(report, tree=tree, notes=("<script>",)))
    assert "<script>" not in page and "<b>x</b>" not in page and "<i>&" not in page
    assert "&lt;i&gt;&amp;" in page


def test_a_pass_says_so(page):
    assert "<title>tiny: passed" in page
    assert re.search(r"Passed\.</span> All 4 gates hold", page)


def test_a_failure_names_every_gate_on_the_wrong_side(failing_page):
    assert "<title>tiny: failed" in failing_page
    assert "2 of 4 gates do not hold" in failing_page
    assert "MAT of hyco: not measured, must be at least 1.8" in failing_page
    assert "first: p3, token 17" in failing_page


def test_findings_fail_a_report_and_say_what_to_do(tmp_path):
    report = synthetic_report(findings=(SWAPPED_NORM,))
    page = render_html(report)
    assert "<title>tiny: failed" in page and "The gates hold, but the diagnosis found faults." in page
    for words in ("norm side", "h arrives from before the final norm", "from the other side", "make the two one"):
        assert words in page
    json_path, _ = write_report(report, tmp_path)
    content = json.loads(json_path.read_text())
    assert content["verdict"] == "fail"
    (finding,) = content["diagnosis"]["findings"]
    assert finding["fault"] == "norm side" and finding["next"] == "make the two one"
    assert "other side of the verifier's final norm" in finding["means"]


def test_a_page_without_findings_tells_the_golden_acceptance(page):
    assert "<h2>Diagnosis</h2>" not in page
    assert "At 32 golden positions the head's chain is taken\nin 0.81, 0.59 of them" in page


def test_the_json_holds_verdict_gates_and_measures(tmp_path):
    json_path, html_path = write_report(synthetic_report(failing=True), tmp_path / "validate")
    content = json.loads(json_path.read_text())
    assert content["verdict"] == "fail"
    assert [gate["passed"] for gate in content["gates"]] == [False, True, False, True]
    assert content["gates"][2]["value"] is None
    assert [system["system"] for system in content["systems"]] == ["cloud-mtp", "hyco-exact", "hyco"]
    assert html_path.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in html_path.parent.iterdir()) == ["report.html", "report.json"]


def test_the_same_report_gives_the_same_page(page):
    assert render_html(synthetic_report()) == page


def test_a_report_without_a_tree_has_no_empty_picture():
    page = render_html(msgspec.structs.replace(synthetic_report(), tree=None))
    assert "One drawn tree" not in page
    assert page.count("<svg") == 3


def test_unverified_tokens_are_marked_and_a_system_without_a_server_has_no_mat():
    report = synthetic_report()
    rounds = [round_trace((0,), kept=(7, 8))]
    others = (
        measure("synera", [generation(*rounds, locals=(local_trace((7, 8)),))], KEEPSET),
        measure("on-device", [generation(primes=(), locals=(local_trace((7, 8, 9)),))], KEEPSET),
    )
    report = msgspec.structs.replace(report, systems=(*report.systems, *others))
    page = render_html(report)
    assert "40.0 % unverified" in page.replace("\N{NO-BREAK SPACE}", " ") and "100.0 % unverified" in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert "\N{MINUS SIGN}100.0" not in page  # no change of a time that there is not
    screen = io.StringIO()
    Console(width=240, file=screen).print(summary(report))
    assert "40% unverified" in screen.getvalue() and "nan" not in screen.getvalue()
    assert "0.00" not in next(line for line in screen.getvalue().splitlines() if line.startswith("on-device"))
