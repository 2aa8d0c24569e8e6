"""Which configuration to use: simulated from measured parts, or swept over values of a recipe.

Enters: times of device, link and server, acceptance by depth, or traces and a run folder. Leaves: what to choose for
which aim, a trade-off with its picture. Read first: `inputs.py`, then `simulation.py`; for sweeps `grid.py`.
"""
