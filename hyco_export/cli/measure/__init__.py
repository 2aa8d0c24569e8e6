"""Commands that measure answers: their options (`commands.py`), and a module for each of their bodies."""
