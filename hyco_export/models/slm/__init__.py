"""The SLM: its checkpoints, the conversion to the static network, calibration and parity.

Enters: a packed or float checkpoint. Leaves: the static network, its weights and quantisation parameters.
Read first: `surgery.py`.
"""
