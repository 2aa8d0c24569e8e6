"""What is exchanged on disk: recipes, artifacts, targets, encodings, keep sets, tables. No torch, no onnx.

Enters: a recipe and the files it names. Leaves: typed values and artifact folders that every other room reads.
Read first: `recipe.py`, then `artifact.py`.
"""
