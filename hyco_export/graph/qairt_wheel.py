"""Another version of onnxruntime-qnn beside the installed one: a folder of its own, in the user's cache.

A context binary loads with the QAIRT version that made it, or a newer one; phones often have an older one. Workers that
compile or emulate with this folder see it before the installed wheel (`qnn_process.Worker`).
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

from hyco_export.errors import CompileError, first_line

WHEEL = "onnxruntime-qnn"
VERSION = re.compile(r"\d+(\.\d+){1,3}([a-z]+\d+)?")
MODULE = "onnxruntime_qnn"
INSTALL_LIMIT_S = 1800.0
KNOWN = "such as 2.6.0; those that exist: pip index versions onnxruntime-qnn"


def wheel_folder(version: str, cache: Path | None = None) -> Path:
    """The folder with this version, installed at the first call; `cache` in place of the user's.

    Raises:
        CompileError: no such version, or it cannot be fetched.
    """
    if not VERSION.fullmatch(version):
        raise CompileError(f"--qairt-wheel {version!r} is no version of {WHEEL}", f"give one {KNOWN}")
    folder = (cache or platformdirs.user_cache_path("hyco-export")) / WHEEL / version
    if (folder / MODULE).is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=".install-", dir=folder.parent))
    try:
        _install(version, build)
        build.rename(folder)
    except OSError:  # another process was faster
        if not (folder / MODULE).is_dir():
            raise
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder


def _install(version: str, folder: Path) -> None:
    """Raises CompileError: pip refuses."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    try:
        done = subprocess.run(
            [*command, f"{WHEEL}=={version}"], capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"fetching {WHEEL} {version} took too long", "try again with a faster network") from error
    if done.returncode or not (folder / MODULE).is_dir():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = first_line(RuntimeError(lines[-1] if lines else done.stderr))
        raise CompileError(
            f"{WHEEL} {version} cannot be installed: {said.removeprefix('ERROR: ')}",
            f"with a network, give a version {KNOWN}",
        )


def qairt_version(folder: Path) -> str:
    """The QAIRT version of a folder's wheel, as its own notes say."""
    text = (folder / MODULE / "build_and_package_info.py").read_text(encoding="utf-8")
    match = re.search(r"qnn_version\s*=\s*[\"']([^\"']+)", text)
    return match[1] if match else "unknown"
