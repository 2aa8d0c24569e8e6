"""The command line: `app` parses, `commands` do the work, `console` shows it."""

from hyco_export.cli.app import main

__all__ = ["main"]
