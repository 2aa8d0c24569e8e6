"""Supported model classes, one file an architecture, and which fields of their configs are honoured.

Enters: a checkpoint's config. Leaves: its static network, or a refusal by name.
Read first: `slm_family.py`, then a short family: `qwen3.py`.
"""
