"""A conversation with a verifier server by the device's driver, round by round.

Enters: a user's questions. Leaves: the text of replies with who proposed it, figures, traces.
Read first: `conversation.py`.
"""
