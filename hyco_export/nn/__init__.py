"""Networks in torch: checkpoints, captures, quantisation-aware training and the static passes."""
