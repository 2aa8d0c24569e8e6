"""Bodies of the commands that measure, plan and show; `cli/measuring.py` declares them.

Enters: options. Leaves: tables, and files of figures. Read first: `plan.py`.
"""
