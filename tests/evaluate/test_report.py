"""The report's two files."""

import html
import io
import json
import re
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from hyco_export.device.systems import find_system
from hyco_export.errors import HycoError, ServerError
from hyco_export.evaluate.metrics import caveats, headline, measure
from hyco_export.evaluate.pictures import acceptance_by_depth, pick_tree
from hyco_export.evaluate.report import (
    Unfinished,
    key_facts,
    render_html,
    replace_file,
    unfinished_report,
    write_report,
)
from hyco_export.evaluate.summary import summary
from hyco_export.protocol.wire import Traffic
from tests.evaluate.synthetic_reports import SWAPPED_NORM, synthetic_report
from tests.evaluate.synthetic_run import KEEPSET
from tests.evaluate.synthetic_traces import generation, local_trace, prime_trace, round_trace


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


STARTED = Unfinished("runs/tiny", "tiny", "sm8850", "http://here:1", "2026-11-30T01:15:58+00:00", "0.1.0")


def verdict_in(folder):
    return json.loads((folder / "report.json").read_text())["verdict"], (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(HycoError("no answer from `x` <b>", "start it"), "could not run"), (KeyboardInterrupt(), "interrupted")],
)
def test_an_earlier_page_does_not_pass_for_that_of_a_run_without_a_verdict(tmp_path, error, verdict):
    write_report(synthetic_report(), tmp_path)
    before = verdict_in(tmp_path)
    for _ in range(2):  # the second one has no finished report to keep, and leaves the kept one alone
        with pytest.raises(type(error)), unfinished_report(STARTED, tmp_path):
            seen, page = verdict_in(tmp_path)
            assert seen == "in progress" and "Passed" not in page and "2026-11-30" in page
            raise error
    seen, page = verdict_in(tmp_path)
    assert (
        seen == verdict and verdict.capitalize() in page and f"<title>tiny: {verdict}" in page and "Passed" not in page
    )
    assert '<a href="earlier.html">' in page
    content = json.loads((tmp_path / "report.json").read_text())
    if isinstance(error, HycoError):
        assert "<li>no answer from <code>x</code> &lt;b&gt;</li>" in page and "<p>Next: start it</p>" in page
        assert (content["reason"], content["next"]) == ("no answer from `x` <b>", "start it")
    assert json.loads((tmp_path / "earlier.json").read_text())["verdict"] == before[0] == "pass"
    assert (tmp_path / "earlier.html").read_text() == before[1]


def test_a_fault_of_the_program_is_told_as_one_and_no_earlier_page_is_promised(tmp_path):
    (tmp_path / "report.json").write_text('{"gates": [], "verdict": "in progress"}')
    (tmp_path / "report.html").write_text("an unfinished page")
    with pytest.raises(KeyError), unfinished_report(STARTED, tmp_path):
        raise KeyError("verifier")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["reason"] == "a fault of hyco-export: KeyError: 'verifier'" and "traceback" in content["next"]
    assert "earlier.html" not in verdict_in(tmp_path)[1] and not (tmp_path / "earlier.html").exists()


def test_the_next_step_is_written_as_a_command_of_this_call(tmp_path):
    def complete(text):
        return text.replace("hyco-export run", "hyco-export run --run runs/x")

    with pytest.raises(HycoError) as caught, unfinished_report(STARTED, tmp_path, complete):
        raise HycoError("the head is missing", "build it: hyco-export run")
    assert "<p>Next: build it: hyco-export run --run runs/x</p>" in verdict_in(tmp_path)[1]
    assert caught.value.hint == "build it: hyco-export run"  # completed once, where it is printed


def test_only_a_failure_has_the_colour_of_one(tmp_path):
    with pytest.raises(HycoError), unfinished_report(STARTED, tmp_path):
        assert '<span class="muted">In progress.' in verdict_in(tmp_path)[1]
        raise HycoError("no answer")
    assert '<span class="bad">Could not run.' in verdict_in(tmp_path)[1]


def test_every_picture_says_that_it_can_be_scrolled_and_undisturbed_runs_have_no_column_for_repeats(page):
    assert page.count("Scroll sideways for the whole picture.") == page.count('<div class="picture">') == 4
    assert "primed · sent" not in page
    assert "milliseconds<" in page and "all rounds" not in page


@pytest.mark.parametrize(
    ("error", "reason", "hint"),
    [
        (ServerError("gone", "run hyco-export serve"), "gone", "run hyco-export serve --run x"),
        (OSError(28, "No space left on device", "a"), "a: No space left on device", "make room"),
        (KeyError("rows"), "a fault of hyco-export: KeyError: 'rows'", "report it with the traceback"),
    ],
)
def test_a_run_without_a_verdict_says_why_and_what_next(tmp_path, error, reason, hint):
    with (
        pytest.raises(type(error)),
        unfinished_report(STARTED, tmp_path, lambda text: text.replace("serve", "serve --run x")),
    ):
        raise error
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["reason"] == reason and said["next"].startswith(hint)
    page = html.unescape((tmp_path / "report.html").read_text())
    assert reason in page and hint in page


def test_a_run_that_ends_well_leaves_its_own_report(tmp_path):
    with unfinished_report(STARTED, tmp_path):
        write_report(synthetic_report(failing=True), tmp_path)
    assert verdict_in(tmp_path)[0] == "fail"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_the_tiles_stand_for_hyco_and_count_back_ends_once():
    report = synthetic_report()
    reordered = tuple(report.systems[place] for place in (0, 2, 1))  # hyco is not the last
    more = (*report.losslessness, *(msgspec.structs.replace(row, system="hyco-2p") for row in report.losslessness))
    facts = key_facts(msgspec.structs.replace(report, systems=reordered, losslessness=more))
    assert facts[0]["detail"].startswith("hyco; cloud-mtp") and facts[1]["detail"] == "hyco against cloud-mtp"
    assert facts[2]["detail"] == "2 systems on 3 back ends"
    assert headline(["a", "hyco", "b"]) == "hyco" and headline(["a", "b"]) == "b"


def test_notes_show_code_and_every_word_is_explained(page):
    noted = render_html(msgspec.structs.replace(synthetic_report(), notes=("With `serve --pad-replies` <i>",)))
    assert "<li>With <code>serve --pad-replies</code> &lt;i&gt;</li>" in noted
    terms = page.split('id="terms"')[1]
    for term in ("MAT", "g, server", "TTFT", "chain", "runner-up", "bonus", "unverified", "primed again", "hand-off"):
        assert f"<dt>{term}" in terms
    for system in ("cloud-mtp", "hyco-exact", "hyco"):
        assert f"<dt><code>{system}</code></dt><dd>{find_system(system).summary}" in html.unescape(terms)


def test_disturbances_are_shown_and_a_system_without_other_times_has_dashes():
    lost = (prime_trace(lost_ms=9.0),)
    disturbed = generation(round_trace((0,), lost_ms=9.0, traffic=Traffic(1, 1, 1, 1, 2)), primes=lost, system="hyco")
    report = synthetic_report()
    systems = (*report.systems[:2], measure("hyco", [disturbed], KEEPSET))
    report = msgspec.structs.replace(report, systems=systems, notes=caveats(systems))
    page = render_html(report)
    assert "primed · sent" in page and "<td>0 · 2</td>" in page and "<td>0 · 0</td>" in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    screen = io.StringIO()
    Console(width=240, file=screen).print(summary(report))
    assert "2 sent again" in screen.getvalue() and "nan" not in screen.getvalue()


def test_pictures_of_many_systems_keep_every_name_and_number_apart():
    report = synthetic_report()
    names = ["a-system-with-quite-a-long-name", *(f"system-{number}" for number in range(8))]
    systems = tuple(msgspec.structs.replace(report.systems[2], system=name) for name in names)
    drawing = acceptance_by_depth(systems, 0.66)
    for name in names:
        assert f">{name}<" in drawing
    found = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>\d\.\d\d<', drawing)
    places = [(float(x), float(y)) for x, y in found]
    assert len(places) == sum(len(system.chain_acceptance) for system in systems)
    for index, (x, y) in enumerate(places):  # in points; a number of 9 pt is 20 wide
        assert all(abs(x - other_x) > 20 or abs(y - other_y) > 9 for other_x, other_y in places[:index])


def test_a_report_is_read_and_written_without_onnx_runtime_and_torch():
    command = (
        "import sys, hyco_export.evaluate.report; "
        "print([name for name in ('onnxruntime', 'onnx', 'torch', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_a_file_that_cannot_be_replaced_is_named_and_leaves_no_part_behind(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    for path in (taken, tmp_path / "nowhere" / "page.html"):
        with pytest.raises(OSError) as caught:
            replace_file(path, b"page")
        assert caught.value.filename == str(path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"] and not list(taken.iterdir())
