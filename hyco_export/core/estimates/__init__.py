"""Tokens, disk, memory and binary sizes of a run, by arithmetic from shapes alone (`--dry-run`).

Enters: shapes of the models and a recipe. Leaves: one estimate a stage.
Read first: `stages.py`.
"""
