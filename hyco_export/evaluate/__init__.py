"""Measurements over a run: metrics, gates and the report."""
