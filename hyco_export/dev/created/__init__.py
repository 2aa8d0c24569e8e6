"""Checkpoints made here at real sizes: the classes, shapes and layouts of released ones, random weights.

Enters: a scale. Leaves: three checkpoints, prompts and a recipe.
Read first: `family.py`.
"""
