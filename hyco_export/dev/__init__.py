"""For those who work on this package and for researchers: the embedded family's training, created checkpoints, peers.

Enters: options of a `hyco-export` command. Leaves: checkpoints and comparisons.
Read first: `tiny/family.py`.
"""
