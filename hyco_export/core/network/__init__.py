"""Static networks of the MTP head and the SLM, each defined once over a small set of operations.

Enters: weights and shapes. Leaves: the same network in torch, as a QDQ graph, and the host's inputs to it in numpy.
Read first: `blocks.py`, then `head.py`.
"""
