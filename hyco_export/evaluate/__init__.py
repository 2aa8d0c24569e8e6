"""Measurements over a run: systems, metrics, gates, reports.

Enters: a run folder and a server. Leaves: traces, figures, a verdict.
Read first: `validate.py`, then `metrics.py`.
"""
