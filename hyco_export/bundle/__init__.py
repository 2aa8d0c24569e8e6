"""Bundles: what an app team takes from a run, with golden vectors that prove a device, and a comparer of its outputs.

Enters: a run's artifacts; outputs of a device. Leaves: one folder with its specification; verdicts by tensor.
Read first: `spec.py`.
"""
