"""`bundle` and `compare` from outside: what they refuse, before anything heavy is imported."""

from pathlib import Path

from tests.cli.test_app import refused, run


def test_a_run_that_was_not_built_is_refused(tmp_path: Path) -> None:
    said = refused("bundle", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert "does not exist" in said and "next: " in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    done = run("compare", str(tmp_path), str(tmp_path))
    assert done.returncode == 2 and "holds no bundle (no bundle.json)" in done.stderr
    assert "hyco-export bundle" in done.stderr and "Traceback" not in done.stderr


def test_a_profile_is_of_a_run_or_of_a_bundle(tmp_path: Path) -> None:
    for arguments, message in (
        (("--bundle", str(tmp_path), "--run", str(tmp_path)), "--bundle with --run"),
        (("--bundle", str(tmp_path), "--feeds", "2", "tiny"), "--bundle with a recipe, --feeds"),
        (("--out", str(tmp_path)), "--out without --bundle"),
    ):
        assert message in refused("profile", *arguments)
    done = run("profile", "--bundle", str(tmp_path))
    assert done.returncode == 2 and "holds no bundle (no bundle.json)" in done.stderr and "next: " in done.stderr
