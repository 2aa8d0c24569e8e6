"""What the parts exchange: recipes, artifacts, targets, encodings, keep sets, ring arithmetic (no torch, no onnx)."""
