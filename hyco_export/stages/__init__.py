"""The offline chain: one module a stage, and the runner that makes them resumable.

Enters: a recipe. Leaves: one artifact a stage in the run folder.
Read first: `table.py`, then `runner.py`.
"""
