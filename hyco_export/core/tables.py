"""The SLM's embedding tables on the host: packed rows on disk, unpacked row by row (HyCo, Appendix A).

Row r of a table is integers[r] * scale[r] * factor. The file is mapped, not read: a gather touches its own rows only,
whatever the size of the table. Rows come out as real values; the caller quantises them for a graph input.

Legend: V vocabulary, D width of a row, B its packed bytes, S scales of a row (usually 1), n rows asked for.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.core.encodings import unpack_rows
from hyco_export.core.files import Declared, TensorWriter
from hyco_export.errors import ArtifactError

TABLES_FILE = "slm_tables.safetensors"
TOKENS = "tokens"
PER_LAYER = "per_layer"
LAYOUT_KEY = "layout"
SCALE = ".scale"


class TableLayout(msgspec.Struct, frozen=True):
    """How the rows of one table are stored: `factor` multiplies every row (the embedding's own constant)."""

    bits: int
    width: int
    factor: float


@dataclass(frozen=True)
class PackedRows:
    """Rows as a checkpoint stores them: packed uint8 [V, B] (int8 [V, D] for 8 bits), scales float32 [V, S]."""

    packed: np.ndarray
    scales: np.ndarray
    layout: TableLayout


def real_rows(packed: np.ndarray, scales: np.ndarray, layout: TableLayout) -> np.ndarray:
    """float32 [n, D] of packed [n, B] and scales [n, S]; each scale covers D / S values in a row."""
    integers = unpack_rows(packed, layout.bits, layout.width).astype(np.float32)
    spread = np.repeat(scales, layout.width // scales.shape[1], axis=1)
    rows: np.ndarray = integers * spread * np.float32(layout.factor)
    return rows


def save_tables(path: Path, tables: dict[str, PackedRows]) -> None:
    """Write tables by name: `tokens`, and `per_layer` where the model has one."""
    declared = {}
    for name, table in tables.items():
        declared[name] = Declared(table.packed.dtype.name, table.packed.shape)
        declared[name + SCALE] = Declared("float32", table.scales.shape)
    layouts = {name: table.layout for name, table in tables.items()}
    with TensorWriter(path, declared, {LAYOUT_KEY: msgspec.json.encode(layouts).decode()}) as writer:
        for name, table in tables.items():
            writer.put(name, table.packed)
            writer.put(name + SCALE, table.scales.astype(np.float32, copy=False))


class StoredRows:
    """One table's packed rows in their file, read by slices.

    Every slice maps the file anew: pages that a long-lived map has read count as the process's memory.
    """

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        self._path, self._name, self.shape = path, name, shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        with safe_open(self._path, framework="numpy") as file:
            found: np.ndarray = file.get_slice(self._name)[start:stop]
        return found


class HostTables:
    """Embedding tables opened for lookups.

    Raises:
        ArtifactError: the file is missing, damaged or has no layout.
    """

    def __init__(self, path: Path) -> None:
        hint = "build it again: hyco-export convert-slm"
        self._path = path
        try:
            self._file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"embedding tables {path} cannot be opened: {error}", hint) from error
        raw = (self._file.metadata() or {}).get(LAYOUT_KEY)
        if raw is None:
            raise ArtifactError(f"embedding tables {path} say nothing of their layout", hint)
        self.layouts = msgspec.json.decode(raw, type=dict[str, TableLayout])
        self._rows = {name: self._file.get_slice(name) for name in self.layouts}
        self._scales: dict[str, np.ndarray] = {name: self._file.get_tensor(name + SCALE) for name in self.layouts}

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        """Token embeddings float32 [n, H] of ids [n]."""
        return self._gather(TOKENS, ids)

    def per_layer(self, ids: np.ndarray) -> np.ndarray:
        """Per-layer embeddings float32 [n, L * P] of ids [n]."""
        return self._gather(PER_LAYER, ids)

    def stored(self, name: str) -> StoredRows:
        """A whole table, packed, to be read in blocks."""
        return StoredRows(self._path, name, tuple(self._rows[name].get_shape()))

    def scales(self, name: str) -> np.ndarray:
        """float32 [V, S]."""
        return self._scales[name]

    def _gather(self, name: str, ids: np.ndarray) -> np.ndarray:
        rows = self._rows[name]
        packed = np.concatenate([rows[int(row) : int(row) + 1] for row in ids])
        return real_rows(packed, self._scales[name][ids], self.layouts[name])
