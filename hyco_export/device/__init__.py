"""The device's half: drafts a tree, sends it, commits the verdict. No torch, no transformers, no onnx.

Enters: a prompt's ids and a run's artifacts. Leaves: the answer's ids and the record of every round.
Read first: `driver.py`, then `systems.py`.
"""
