"""The server's own drafting beside other programs that run the same verifier and head.

Enters: prompts. Leaves: texts that must be equal, and times.
Read first: `comparison.py`.
"""
