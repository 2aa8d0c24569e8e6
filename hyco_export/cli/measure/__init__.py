"""Commands that measure: what answers are worth, and how sure a difference is.

Enters: an evaluation's folder. Leaves: scores and contrasts in it. Read first: `commands.py`.
"""
