"""ONNX in, ONNX out: static QDQ graphs, their checks, and the NPU's compiler.

Enters: a static network. Leaves: QDQ graphs and Hexagon context binaries, checked.
Read first: `qdq_ops.py`, then `qnn.py`.
"""
