"""The embedded tiny family: its text, tokenizer, training and packed checkpoints.

Enters: Python's documentation. Leaves: three checkpoints and their model card.
Read first: `family.py`.
"""
