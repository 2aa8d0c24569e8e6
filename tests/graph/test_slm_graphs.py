"""The SLM's integer graphs: clean, close to float, with the checkpoint's integers, accepted whole by the compiler."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from hyco_export.core.device_spec import GraphSpec, TensorSpec, to_integers, to_real
from hyco_export.core.network.host import SlmHost
from hyco_export.core.network.quantisation import slm_encodings
from hyco_export.core.network.slm import layer_results
from hyco_export.core.numerics import sqnr_db, top1_agreement
from hyco_export.core.targets import TARGETS
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import ReferenceSession, compare_sessions
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.slm_graphs import StoredMatrices, prefill_graph, tree_graph, with_outputs
from hyco_export.models.slm.calibration import calibrated_ranges
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import KEPT, MASK_VALUE, slm_parts

KINDS = ("like-e2b", "values-from-keys")


def tree_feeds(kind: str) -> dict[str, np.ndarray]:
    """Real inputs of a forest on top of a wrapped ring."""
    parts = slm_parts(kind)
    host = SlmHost(parts.network, parts.tables, ROWS, MASK_VALUE)
    for start in range(0, 18, ROWS):
        host.append(parts.float_slm.tree, random_ids(18)[start : start + ROWS])
    return host.feeds(random_ids(ROWS, 9), [-1, 0, 0, 1, -1, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_clean(kind: str) -> None:
    parts = slm_parts(kind)
    for model in (parts.tree_model, parts.prefill_model):
        onnx.checker.check_model(model, full_check=True)
        assert lint(model) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_graph_is_near_the_float_network(kind: str) -> None:
    parts = slm_parts(kind)
    integers = to_integers(parts.tree.inputs, tree_feeds(kind))
    found = to_real(parts.tree.outputs, ReferenceSession(parts.tree_model.SerializeToString()).run(integers))
    wanted = parts.float_slm.tree(to_real(parts.tree.inputs, integers))
    assert set(found) == set(wanted)
    assert found["logits"].shape == (ROWS, len(KEPT))
    for name in found:
        assert sqnr_db(wanted[name], found[name]) > 28.0, name  # 8-bit K/V bound it
    assert top1_agreement(wanted["logits"], found["logits"]) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_makes_the_rows_a_tree_pass_makes(kind: str) -> None:
    parts = slm_parts(kind)
    feeds = tree_feeds(kind)
    tree = ReferenceSession(parts.tree_model.SerializeToString()).run(to_integers(parts.tree.inputs, feeds))
    prefill = ReferenceSession(parts.prefill_model.SerializeToString()).run(to_integers(parts.prefill.inputs, feeds))
    assert set(prefill) == set(tree) - {"logits"}
    for name in prefill:
        assert np.array_equal(prefill[name], tree[name]), name


def test_prefill_ends_at_the_last_layer_that_stores() -> None:
    parts = slm_parts()
    names = {spec.name for spec in parts.prefill.inputs}
    assert names == {
        "embeds",
        "per_layer",
        "cos.sliding",
        "sin.sliding",
        "k.0",
        "v.0",
        "mask.sliding",
        "cos.full",
        "sin.full",
    }
    assert not any("layers.2." in name for name in StoredMatrices(parts.prefill_model))


def test_declared_inputs_and_outputs_are_those_of_the_contract() -> None:
    parts = slm_parts()
    shapes = {spec.name: (spec.shape, spec.dtype) for spec in (*parts.tree.inputs, *parts.tree.outputs)}
    assert shapes == {
        "embeds": ((ROWS, 32), "uint16"),
        "per_layer": ((ROWS, 20), "uint16"),
        "cos.sliding": ((ROWS, 8), "uint16"),
        "sin.sliding": ((ROWS, 8), "uint16"),
        "cos.full": ((ROWS, 16), "uint16"),
        "sin.full": ((ROWS, 16), "uint16"),
        "k.0": ((1, 8, 8), "uint8"),
        "v.0": ((1, 8, 8), "uint8"),
        "k.1": ((1, 12, 16), "uint8"),
        "v.1": ((1, 12, 16), "uint8"),
        "mask.sliding": ((ROWS, 8 + ROWS), "uint16"),
        "mask.full": ((ROWS, 12 + ROWS), "uint16"),
        "k_new.0": ((1, ROWS, 8), "uint8"),
        "v_new.0": ((1, ROWS, 8), "uint8"),
        "k_new.1": ((1, ROWS, 16), "uint8"),
        "v_new.1": ((1, ROWS, 16), "uint8"),
        "logits": ((ROWS, len(KEPT)), "uint16"),
    }
    for name in ("k", "v"):
        assert parts.tree.input(f"{name}.1").encoding == parts.tree.output(f"{name}_new.1").encoding


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_in_the_graph_unchanged(kind: str) -> None:
    parts = slm_parts(kind)
    stored = StoredMatrices(parts.tree_model)
    assert set(stored) == set(parts.weights.matrices)
    for name, matrix in parts.weights.integer_matrices().items():
        assert np.array_equal(stored[name][0], matrix.integers), name
        assert np.array_equal(stored[name][1], matrix.scales), name


def test_inner_tensors_can_be_read() -> None:
    parts = slm_parts()
    names = layer_results(parts.network)
    assert len(names) == 6
    inner = [TensorSpec(name, (ROWS, 32), "uint16", parts.encodings[name]) for name in names]
    session = ReferenceSession(with_outputs(parts.tree_model, inner).SerializeToString())
    found = session.run(to_integers(parts.tree.inputs, tree_feeds("like-e2b")))
    assert all(found[name].dtype == np.uint16 for name in names)
    assert len(parts.tree_model.graph.output) == len(parts.tree.outputs)  # the graph itself is as before


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_takes_the_whole_graph_and_computes_it(kind: str, tmp_path: Path) -> None:
    parts = slm_parts(kind)
    model = tmp_path / "slm_tree.onnx"
    onnx.save(parts.tree_model, model)
    target = TARGETS["sm8850"]
    context = compile_context(model, tmp_path, "slm_tree", target, tmp_path / "log")
    feeds = to_integers(parts.tree.inputs, tree_feeds(kind))
    with open_context(context.context_model, target) as session:
        report = compare_sessions(ReferenceSession(model), session, parts.tree, [feeds])
    for output in report.outputs:
        assert output.sqnr_db > 20.0, output  # random weights amplify every flipped step of an 8-bit K or V


# ---- rings of 16 bits

ALL_RINGS = ("k.0", "v.0", "k.1", "v.1", "k.2", "v.2")


@lru_cache
def wide_graphs(kind: str) -> tuple[onnx.ModelProto, GraphSpec, onnx.ModelProto, GraphSpec]:
    """Tree graph and prefill graph, each with its spec, all K/V in 16 bits."""
    parts = slm_parts(kind)
    sequences = [random_ids(40, seed) for seed in range(4)]
    ranges = calibrated_ranges(
        parts.float_slm, parts.tables, sequences, ROWS, MASK_VALUE, 100.0, 99.9, lambda done, total: None
    )
    encodings = slm_encodings(parts.network, ranges, 1.2, 1.2, MASK_VALUE, ALL_RINGS)
    return (
        *tree_graph(parts.network, parts.weights, encodings, ROWS),
        *prefill_graph(parts.network, parts.weights, encodings, ROWS),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_wide_rings_leave_little_between_graph_and_network(kind: str) -> None:
    parts, (tree, spec, prefill, prefill_spec) = slm_parts(kind), wide_graphs(kind)
    for model in (tree, prefill):
        onnx.checker.check_model(model, full_check=True)
        assert lint(model) == []
    integers = to_integers(spec.inputs, tree_feeds(kind))
    outputs = ReferenceSession(tree.SerializeToString()).run(integers)
    found, wanted = to_real(spec.outputs, outputs), parts.float_slm.tree(to_real(spec.inputs, integers))
    for name in found:
        assert sqnr_db(wanted[name], found[name]) > 50.0, name  # with 8 bits 31 to 43
    inputs = {each.name: integers[each.name] for each in prefill_spec.inputs}
    rows = ReferenceSession(prefill.SerializeToString()).run(inputs)
    assert all(np.array_equal(rows[name], outputs[name]) for name in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_computes_wide_rings_better_than_narrow_ones(kind: str, tmp_path: Path) -> None:
    parts, feeds = slm_parts(kind), tree_feeds(kind)
    exact = parts.float_slm.tree(feeds)["logits"]
    found = []
    for name, model, spec in (("narrow", parts.tree_model, parts.tree), ("wide", *wide_graphs(kind)[:2])):
        (tmp_path / name).mkdir()
        onnx.save(model, tmp_path / name / "slm_tree.onnx")
        target, log = TARGETS["sm8850"], tmp_path / "log"
        context = compile_context(tmp_path / name / "slm_tree.onnx", tmp_path / name, "slm_tree", target, log)
        with open_context(context.context_model, target) as session:
            outputs = to_real(spec.outputs, session.run(to_integers(spec.inputs, feeds)))
        found.append(sqnr_db(exact, outputs["logits"]))
    assert found[1] > found[0] + 3.0  # seen: 32 and 37 dB, 34 and 39
