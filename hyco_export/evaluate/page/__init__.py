"""A page to read measurements on: figures side by side, and every recorded round step by step.

Enters: folders of validations, benchmarks, evaluations, or traces. Leaves: one HTML file that needs no other.
Read first: `sources.py`, then `page.py`.
"""
