"""A stored head comes back as it was, restricted where the device needs it restricted."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.handoff import KvShape
from hyco_export.core.network.head import HeadArchitecture, HeadLayer
from hyco_export.core.network.quantisation import handoff_encodings
from hyco_export.core.network.weight_files import HEAD_FILE, StoredHead, read_head, write_head
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, read_kept_table
from hyco_export.errors import ArtifactError

ARCHITECTURE = HeadArchitecture(
    backbone=4,
    width=6,
    vocab_size=10,
    epsilon=1e-6,
    layers=(HeadLayer("sliding", 2, KvShape(1, 2), 1.0), HeadLayer("full", 2, KvShape(1, 4), 0.5)),
    spans={"sliding": 5, "full": None},
    inv_freq={"sliding": (1.0,), "full": (1.0, 0.0)},
)


@pytest.fixture
def head():
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        integers = rng.integers(-8, 8, (rows, columns), np.int8)
        return IntegerMatrix(integers, rng.random(rows, np.float32), 4)

    matrices = {"lm_head": matrix(10, 6), "pre_projection": matrix(6, 8)}
    return StoredHead(ARCHITECTURE, 4, matrices, {"norm": rng.random(6, np.float32)})


def test_a_head_survives_the_disk(tmp_path, head):
    write_head(tmp_path / HEAD_FILE, head)
    found = read_head(tmp_path)

    assert found.architecture == ARCHITECTURE
    assert found.bits == 4
    assert found.matrices.keys() == head.matrices.keys()
    for name, matrix in head.matrices.items():
        np.testing.assert_array_equal(found.matrices[name].integers, matrix.integers)
        np.testing.assert_array_equal(found.matrices[name].scales, matrix.scales)
        assert found.matrices[name].bits == 4
    np.testing.assert_array_equal(found.vectors["norm"], head.vectors["norm"])
    assert found.architecture.kv_shape("full") == KvShape(1, 4)


def test_widths_and_blocks_survive_the_disk(tmp_path, head):
    rng = np.random.default_rng(1)
    wide = IntegerMatrix(rng.integers(-128, 128, (4, 6), np.int8), rng.random(4, np.float32), 8)
    blocks = IntegerMatrix(
        rng.integers(-8, 8, (6, 8), np.int8), rng.random(6, np.float32), 4, rng.integers(1, 17, (6, 2), np.uint8)
    )
    matrices = {**head.matrices, "post_projection": wide, "pre_projection": blocks}
    write_head(tmp_path / HEAD_FILE, StoredHead(ARCHITECTURE, 4, matrices, head.vectors))
    found = read_head(tmp_path).matrices
    assert {name: matrix.bits for name, matrix in found.items()} == {
        "lm_head": 4,
        "post_projection": 8,
        "pre_projection": 4,
    }
    np.testing.assert_array_equal(found["pre_projection"].multipliers, blocks.multipliers)
    np.testing.assert_array_equal(found["pre_projection"].real(), blocks.real())
    assert found["pre_projection"].block == 4
    assert found["lm_head"].multipliers is None


def test_rows_and_columns_of_a_matrix_in_blocks_are_those_of_its_values():
    rng = np.random.default_rng(2)
    matrix = IntegerMatrix(
        rng.integers(-8, 8, (5, 12), np.int8), rng.random(5, np.float32), 4, rng.integers(1, 17, (5, 3), np.uint8)
    )
    by_hand = matrix.integers * matrix.scales[:, None] * np.repeat(matrix.multipliers, 4, axis=1)
    np.testing.assert_allclose(matrix.real(), by_hand, rtol=1e-6)
    np.testing.assert_array_equal(matrix.rows(np.array([3, 1])).real(), matrix.real()[[3, 1]])
    np.testing.assert_array_equal(matrix.columns(4, 12).real(), matrix.real()[:, 4:])
    with pytest.raises(ValueError, match=r"columns 2 \.\. 12 cut blocks of 4"):
        matrix.columns(2, 12)
    assert matrix.stored_bytes == (5 * 12 * 4 + 5 * 3 * 4) // 8 + 4 * 5


def test_the_device_gets_the_kept_rows_only(head):
    kept = np.array([1, 4, 9])
    table = IntegerTable(np.zeros((3, 4), np.uint8), np.ones(3, np.float32))
    weights = head.device_weights(kept, table, np.full(4, 2.0, np.float32))

    output = weights.matrices["lm_head"]
    np.testing.assert_array_equal(output.integers, head.matrices["lm_head"].integers[kept])
    np.testing.assert_array_equal(output.scales, head.matrices["lm_head"].scales[kept])
    assert weights.matrices["pre_projection"] is head.matrices["pre_projection"]
    assert weights.vectors["final_norm"].tolist() == [2.0] * 4
    assert "final_norm" not in head.device_weights(kept, table, None).vectors
    assert weights.tables == {"kept_embeddings": table}


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_what_is_not_a_head_is_named(tmp_path, head, damage):
    path = tmp_path / HEAD_FILE
    if damage == "cut":
        write_head(path, head)
        path.write_bytes(path.read_bytes()[:-4])
    if damage == "other":
        save_file({"x": np.zeros(1)}, path)
    with pytest.raises(ArtifactError, match=r"head\.safetensors is not a quantised head") as caught:
        read_head(tmp_path)
    assert caught.value.hint == "build it again: hyco-export qat-head"


def test_the_kept_table_moves_to_unsigned_rows(tmp_path):
    signed, scales = np.array([[-127, 0, 5]], np.int8), np.array([0.5], np.float32)
    save_file({"table": signed, "table_scale": scales}, tmp_path / "keepset.safetensors")
    table = read_kept_table(tmp_path)
    assert table.integers.tolist() == [[1, 128, 133]]
    np.testing.assert_array_equal(table.real(np.array([0])), [[-63.5, 0.0, 2.5]])


def test_a_keep_set_without_table_is_named(tmp_path):
    save_file({"ids": np.zeros(1, np.int32)}, tmp_path / "keepset.safetensors")
    with pytest.raises(ArtifactError, match="holds no embedding table"):
        read_kept_table(tmp_path)


def test_hand_off_grids_centre_keys_and_values():
    grids = handoff_encodings({"e": (-1.0, 3.0), "h": (-2.0, 2.0), "k.full": (-1.0, 3.0), "v.full": (-4.0, 1.0)})
    assert grids["e"].zero_point == 64
    assert grids["k.full"].zero_point == grids["v.full"].zero_point == 128
    assert grids["v.full"].dequantize(grids["v.full"].quantize(np.array([-4.0])))[0] == pytest.approx(-4.0, abs=0.02)
    assert {grid.dtype for grid in grids.values()} == {"uint8"}
