"""What a folder is read as."""

import json
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.files import write_json
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.evaluate.metrics import measure, without_evidence
from hyco_export.evaluate.page.sources import Source, has_evidence, read_sources, run_of, systems_from_json
from hyco_export.evaluate.traces import trace_bytes, write_traces
from tests.evaluate.page.folders import KEEPSET, SYSTEMS, VERIFIER, answers, bench_folder, figures


def test_a_benchmark_has_the_figures_of_its_json_and_its_traces(bench: Source, folders: dict[str, Path]) -> None:
    assert (bench.name, bench.kind, bench.verifier) == ("a-bench", "benchmark", VERIFIER)
    assert json.loads(msgspec.json.encode(bench.systems)) == json.loads((folders["bench"] / "systems.json").read_text())
    assert {name: len(traces) for name, traces in bench.traces.items()} == dict.fromkeys(SYSTEMS, 4)
    assert bench.rounds == 48 and bench.keepset_known and not bench.notes and has_evidence(bench.traces)


def test_an_evaluation_has_its_answers_and_summary(evaluation: Source) -> None:
    assert evaluation.kind == "evaluation" and evaluation.evaluation is not None
    assert evaluation.evaluation.summary.coverage == {"cloud-mtp": (4, 4), "hyco": (4, 5)}
    assert [one.question for one in evaluation.evaluation.failures] == ["q9"]
    assert evaluation.systems[1].system == "hyco"


def test_a_run_stands_for_all_that_lies_in_it(folders: dict[str, Path]) -> None:
    found = read_sources([folders["run"]])
    assert [(one.name, one.kind) for one in found] == [
        ("a-run/validate", "validation"),
        ("a-run/bench", "benchmark"),
    ]
    assert found[0].report is not None and found[0].report["verdict"] == "pass"
    assert not found[0].traces
    assert run_of(folders["run"] / "bench") == folders["run"].resolve() == run_of(folders["run"])
    assert run_of(folders["bench"]) is None


def test_a_validations_traces_belong_to_it_where_their_rounds_are_as_many(tmp_path: Path) -> None:
    made = {system: answers(system, 3, 4) for system in SYSTEMS}
    (tmp_path / "validate").mkdir()
    report = {"verdict": "pass", "systems": figures(made), "gates": [], "notes": []}
    write_json(tmp_path / "validate" / "report.json", report)
    for system, traces in made.items():
        write_traces(tmp_path / "traces" / f"{system}.jsonl", traces)
    (one,) = read_sources([tmp_path])
    assert one.kind == "validation" and one.rounds == 24 and "p~" in one.notes[0]
    write_traces(tmp_path / "traces" / "hyco.jsonl", made["hyco"][:1])
    assert [one.kind for one in read_sources([tmp_path])] == ["validation", "traces"]


def test_a_stopped_benchmark_shows_what_was_recorded(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "stopped", finished=False)
    with (folder / "hyco.jsonl").open("ab") as file:  # a kill left half a generation
        file.write(trace_bytes(answers("hyco", 1, 3)[0])[:700])
    (source,) = read_sources([folder])
    assert "was not finished" in source.notes[0] and not source.keepset_known
    expected = measure("hyco", list(map(without_evidence, answers("hyco", 4, 6))), KEEPSET)
    found = msgspec.structs.replace(source.systems[1], bonus_misses=expected.bonus_misses)
    assert found == expected


def test_traces_alone_are_measured_here(tmp_path: Path) -> None:
    write_traces(tmp_path / "logged" / "hyco.jsonl", answers("hyco", 2, 3))
    for given in (tmp_path / "logged", tmp_path / "logged" / "hyco.jsonl"):
        (source,) = read_sources([given])
        assert (source.kind, source.rounds, source.systems[0].system) == ("traces", 6, "hyco")


def test_names_differ_and_a_folder_is_shown_once(tmp_path: Path) -> None:
    one, other = bench_folder(tmp_path / "a" / "bench", 2, 2), bench_folder(tmp_path / "b" / "bench", 2, 2)
    assert [source.name for source in read_sources([one, other, one])] == ["bench", "bench (2)"]


def test_a_validation_without_a_verdict_says_why(tmp_path: Path) -> None:
    (tmp_path / "validate").mkdir()
    report = {"verdict": "could not run", "reason": "nobody answers", "next": "start a server"}
    write_json(tmp_path / "validate" / "report.json", report)
    (source,) = read_sources([tmp_path])
    assert not source.systems and source.report == report


def test_figures_in_a_profiled_devices_times_are_noted(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "profiled", 2, 2)
    told = json.loads((folder / "systems.json").read_text())
    told[1]["draft_ms_per_token"] *= 0.5
    write_json(folder / "systems.json", told)
    assert "times of a profiled device" in read_sources([folder])[0].notes[0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no plan, report or traces"),
        ({"plan.json": "{}", "hyco.jsonl": ""}, "holds no finished generation"),
        ({"capture/manifest.json": "{}"}, "holds no measurement yet"),
    ],
)
def test_a_folder_without_a_measurement_is_refused(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(HycoError, match=words) as refused:
        read_sources([tmp_path])
    assert "folder" in refused.value.hint or "hyco-export" in refused.value.hint


def test_a_missing_folder_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HycoError, match="does not exist"):
        read_sources([tmp_path / "nowhere"])
    folder = bench_folder(tmp_path / "damaged", 2, 2)
    (folder / "systems.json").write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_sources([folder])
    with pytest.raises(ArtifactError, match="no figures of systems"):
        systems_from_json([{"system": "hyco"}], folder)
