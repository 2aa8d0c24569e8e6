"""Commands that measure, plan and show. `commands` declares them; each has its body in a module of its name.

Enters: a command line. Leaves: tables, and files of figures. Read first: `commands.py`.
"""
