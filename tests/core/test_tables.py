"""Packed tables on disk give the rows of the embedding, one row at a time."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.encodings import pack_rows
from hyco_export.core.tables import PER_LAYER, TOKENS, HostTables, PackedRows, TableLayout, save_tables
from hyco_export.errors import ArtifactError

VOCAB, WIDTH = 50, 6


def table(bits: int, scales_per_row: int = 1, factor: float = 1.0, seed: int = 0) -> tuple[PackedRows, np.ndarray]:
    """A table and its real rows [V, D]."""
    generator = np.random.default_rng(seed)
    integers = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (VOCAB, WIDTH)).astype(np.int8)
    scales = (generator.random((VOCAB, scales_per_row)) + 0.1).astype(np.float32)
    real = integers.astype(np.float32) * np.repeat(scales, WIDTH // scales_per_row, axis=1) * np.float32(factor)
    return PackedRows(pack_rows(integers, bits), scales, TableLayout(bits, WIDTH, factor)), real


def test_rows_of_both_tables(tmp_path: Path) -> None:
    tokens, real_tokens = table(2, factor=8.0)
    per_layer, real_per_layer = table(4, scales_per_row=3, factor=0.5, seed=1)
    save_tables(tmp_path / "t.safetensors", {TOKENS: tokens, PER_LAYER: per_layer})
    opened = HostTables(tmp_path / "t.safetensors")
    ids = np.array([3, 49, 3, 0])
    assert np.array_equal(opened.tokens(ids), real_tokens[ids])
    assert np.array_equal(opened.per_layer(ids), real_per_layer[ids])
    assert opened.tokens(ids).dtype == np.float32


def test_whole_tables_come_back_unchanged(tmp_path: Path) -> None:
    tokens, _ = table(8)
    save_tables(tmp_path / "t.safetensors", {TOKENS: tokens})
    found = HostTables(tmp_path / "t.safetensors")
    assert found.layouts == {TOKENS: tokens.layout}
    assert found.stored(TOKENS).shape == tokens.packed.shape
    assert np.array_equal(found.stored(TOKENS)[3:40], tokens.packed[3:40])
    assert np.array_equal(found.scales(TOKENS), tokens.scales)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.safetensors cannot be opened"):
        HostTables(tmp_path / "none.safetensors")
    tokens, _ = table(4)
    path = tmp_path / "t.safetensors"
    save_tables(path, {TOKENS: tokens})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match="cannot be opened"):
        HostTables(path)
