"""What a page says of one source."""

import msgspec
import pytest

from hyco_export.evaluate.page.parts import Part, part
from hyco_export.evaluate.page.sources import Source, read_sources
from hyco_export.evaluate.page.tables import compare


@pytest.fixture(scope="module")
def benched(bench: Source) -> Part:
    return part(compare(bench))


@pytest.fixture(scope="module")
def evaluated(evaluation: Source) -> Part:
    return part(compare(evaluation))


def test_it_says_machine_link_back_end_and_server(benched: Part) -> None:
    lead = benched.lead
    for told in ("2 systems", "4 answers each", "onnx-cpu", "as over lte", "a test, 2 cores", "hyco-export 0.1.0"):
        assert told in lead


def test_every_picture_has_a_table(benched: Part, evaluated: Part) -> None:
    found = [one for made in (benched, evaluated) for section in made.sections for one in section.figures]
    drawn = [one for one in found if one.svg]
    assert len(drawn) > 15
    assert all(one.table.rows and one.title for one in drawn)


def test_what_a_reader_wants_first_has_intervals(bench: Source, benched: Part, evaluated: Part) -> None:
    facts = {name: (value, detail) for name, value, detail in benched.facts}
    mat = bench.systems[1].mat
    assert facts["tokens a round"][0] == f"{mat:.2f}" and "95 %:" in facts["tokens a round"][1]
    assert "hyco against cloud-mtp" in facts["server time per token"][1]
    assert facts["rounds recorded"][0] == "48"
    assert {name: value for name, value, _ in evaluated.facts}["answers"] == "8 of 9"


def test_a_validation_has_its_verdict_and_gates(folders: dict) -> None:
    shown = part(compare(read_sources([folders["run"]])[0]))
    assert shown.facts[0] == ("verdict", "pass", "4 of 4 gates hold")
    assert shown.sections[0].title == "Gates" and not shown.sections[0].figures[0].open
    assert not shown.recorded and any("emulator" in note for note in shown.notes)


def test_gates_that_do_not_hold_are_shown_at_once(folders: dict) -> None:
    source = read_sources([folders["run"]])[0]
    assert source.report is not None
    gates = [{**gate, "passed": False, "value": None} for gate in source.report["gates"]]
    failed = msgspec.structs.replace(source, report={**source.report, "gates": gates, "verdict": "fail"})
    (gate_figure,) = part(compare(failed)).sections[0].figures
    assert gate_figure.open and gate_figure.table.rows[0][3].good is False


def test_a_validation_that_could_not_run_says_why() -> None:
    report = {"verdict": "could not run", "reason": "nobody answers", "next": "start it"}
    shown = part(compare(Source("run/validate", "validation", "run", (), report=report)))
    assert shown.notes == ("nobody answers; next: start it",) and not shown.sections
    assert shown.facts[0][:2] == ("verdict", "could not run")
