"""The offline chain: one module a stage, and the runner that makes them resumable.

Enters: a recipe. Leaves: one artifact a stage in the run folder.
Read first: `declarations.py`, then `runner.py`.
"""
