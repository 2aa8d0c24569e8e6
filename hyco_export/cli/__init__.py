"""The command line: `app` parses, the module of a command does its work, `console` shows it.

Enters: a command line. Leaves: an exit code, and what the terminal shows. Read first: `app.py`.
"""

from hyco_export.cli.app import main

__all__ = ["main"]
