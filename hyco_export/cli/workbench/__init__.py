"""Commands of the workbench: `inspect`, `bisect`, `doctor`, `explain`, `recipes`.

Enters: options of `cli.command_groups`. Leaves: what the terminal shows, and the exit code.
Read first: `inspection.py`.
"""
