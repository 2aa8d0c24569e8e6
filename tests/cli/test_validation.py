"""Refusals of `validate` and `replay`."""

from pathlib import Path

from tests.cli.test_app import refused


def test_replay_refuses_what_is_no_trace_and_what_is_no_rule(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    assert "is not a trace" in refused("replay", str(path))
    assert "acceptance.rule is 'fuzzy'" in refused("replay", str(path), "--rule", "fuzzy")
    assert "acceptance.epsilon is 2.0, it must lie in (0, 1]" in refused("replay", str(path), "--epsilon", "2")


def test_traces_that_could_not_be_written_are_refused_before_the_validation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder in ("file", "file/traces", "/proc/traces"):
        message = refused("validate", "--server", "http://127.0.0.1:9", "--traces", str(tmp_path / folder))
        assert f"error: {tmp_path / folder}: " in message
