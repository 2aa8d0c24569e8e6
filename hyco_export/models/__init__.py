"""Checkpoints in torch: loading, captures, quantisation-aware training, static passes.

Enters: checkpoint folders. Leaves: captures, quantised weights, references to compare graphs with.
Read first: `checkpoints.py`, then `verifier.py`.
"""
