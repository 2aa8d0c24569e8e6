"""ONNX in, ONNX out: static QDQ graphs, their checks, and the NPU compiler."""
