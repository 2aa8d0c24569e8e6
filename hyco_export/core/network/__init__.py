"""Static networks, each defined once: the same function runs in torch and writes the QDQ graph (no torch, no onnx)."""
