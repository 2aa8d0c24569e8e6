"""JSON for people and programs: what every artifact's reports and specs are written with."""

from pathlib import Path
from typing import Any

import msgspec


def pretty_json(value: Any) -> bytes:
    """Indented, in the order of its fields."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as one file."""
    path.write_bytes(pretty_json(value))
