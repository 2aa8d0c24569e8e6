"""The MTP head: its steps in float, its low-bit weights and their training, its static pass.

Enters: the head's checkpoint and captures. Leaves: quantised weights and what they cost.
Read first: `unroll.py`, then `qat.py`.
"""
