"""`driver.pyz`: the device's half of this package as one file that Python runs.

Holds `device/`, `protocol/`, `core/` as far as they import no framework, and `bundle/chat.py` as its entry point.
"""

import zipfile
from pathlib import Path

import hyco_export

ROOT = Path(hyco_export.__file__).parent
WHOLE = ("core", "device", "protocol")
SINGLE = ("__init__.py", "errors.py", "bundle/__init__.py", "bundle/spec.py", "bundle/graphs.py", "bundle/chat.py")
MAIN = "from hyco_export.bundle.chat import main\n\nmain()\n"
WRITTEN = (2026, 1, 1, 0, 0, 0)  # the same bytes whenever it is made
SHEBANG = b"#!/usr/bin/env python3\n"


def write_driver(path: Path) -> None:
    """Write the archive; equal sources give equal bytes."""
    files = {ROOT / name for name in SINGLE}
    for room in WHOLE:
        files |= set((ROOT / room).rglob("*.py"))
    with path.open("wb") as stream:
        stream.write(SHEBANG)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            _add(archive, "__main__.py", MAIN.encode())
            for file in sorted(files):
                _add(archive, file.relative_to(ROOT.parent).as_posix(), file.read_bytes())


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, WRITTEN)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)
