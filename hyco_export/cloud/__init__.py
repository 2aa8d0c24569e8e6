"""Phones in the vendor's cloud (AI Hub): graphs compiled there, or run and timed there.

Enters: a graph's folder and feeds. Leaves: a compiled pair, or outputs and times. Read first: `client.py`.
"""
