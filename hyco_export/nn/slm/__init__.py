"""The SLM: packed checkpoints, surgery to the static network, its passes, calibration and proofs."""
