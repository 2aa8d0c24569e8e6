"""`bisect` from outside: what it refuses, before anything heavy is imported."""

from pathlib import Path

from tests.cli.test_app import refused, run


def test_help_and_refusals_come_before_anything_heavy(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    for arguments, message in (
        (("--graph", "tree"), "unknown graph 'tree'"),
        (("--candidate", "gpu"), "'gpu' is neither a back end nor a folder"),
        (("--reference", missing), "is neither a back end nor a folder"),
        (("--run", missing), "does not exist"),
    ):
        said = refused("bisect", *arguments)
        assert message in said and "next: " in said
    shown = run("bisect", "--help")
    assert shown.returncode == 0 and shown.stderr == "heavy: \n"
