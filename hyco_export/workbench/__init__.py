"""Tools for the person at the machine: what a file is, how two differ, what this machine lacks, where results part.

Enters: any file, a run folder, this machine. Leaves: facts, differences, findings. Read first: `facts.py`.
"""
