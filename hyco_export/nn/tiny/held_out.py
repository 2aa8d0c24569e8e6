"""Subjects of the standard library that the tiny family is never trained on.

The validation prompts ask about these names only. No dialogue of the training corpus asks about them.
"""

from pathlib import Path

HELD_OUT_SUBJECTS = frozenset(Path(__file__).with_name("held_out.txt").read_text(encoding="utf-8").split())
