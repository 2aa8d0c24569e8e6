"""Static networks, defined once: the same function runs on torch (float) and emits the QDQ graph (no torch, no onnx)."""
