"""Commands of `hyco-export dev`: checkpoints made here, and speeds compared.

Enters: options of `cli.command_groups`. Leaves: what the terminal shows, and the exit code.
Read first: `checkpoints.py`.
"""
