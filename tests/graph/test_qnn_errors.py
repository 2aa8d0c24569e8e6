"""Vendor texts become causes and next steps."""

from pathlib import Path

import pytest

from hyco_export.graph.qnn_errors import KNOWN_ERRORS, explain, read_refusals

VERBOSE_LOG = """[V:onnxruntime:, x.cc:1713 LogNodeSupport] Validation FAILED for 4 nodes in OrtNodeUnit (Gemm) :
\tOperator type: DequantizeLinear Node name: DequantizeLinear_x_real Node index: 1
\tOperator type: Gemm Node name: up Node index: 2
\tOperator type: QuantizeLinear Node name: QuantizeLinear_y Node index: 3
\tREASON : Failed to add node.

[V:onnxruntime:, x.cc:1713 LogNodeSupport] Validation PASSED for 1 nodes in OrtNodeUnit (Tanh) :
\tOperator type: Tanh Node name: t Node index: 7
"""


@pytest.mark.parametrize("known", KNOWN_ERRORS, ids=lambda known: known.text[:20])
def test_known_texts_get_a_cause_and_a_next_step(known) -> None:
    error = explain(f"[ONNXRuntimeError] : 10 : {known.text}: more", "head_ctx.onnx", None)
    assert "head_ctx.onnx" in error.message and "ONNXRuntimeError" not in error.message
    assert error.hint


def test_code_1002_is_explained() -> None:
    error = explain("Failed to finalize QNN graph. Error code: 1002 at location", "head", Path("c.log"))
    assert error.message == "the NPU compiler refuses an operator of head (code 1002)"
    assert error.hint.endswith("its log is c.log")


def test_unknown_texts_are_passed_on_in_one_short_line() -> None:
    error = explain("a new\n  failure " + "x" * 1000, "head", Path("c.log"))
    assert error.message.startswith("the NPU compiler failed on head: a new failure xxx")
    assert len(error.message) < 350 and "\n" not in error.message
    assert error.hint == "its log is c.log"


def test_refused_units_are_read_from_the_log_once() -> None:
    assert read_refusals(VERBOSE_LOG * 2) == ["Gemm up (Failed to add node)"]


def test_a_log_without_refusals_gives_none() -> None:
    assert read_refusals("nothing here") == []
