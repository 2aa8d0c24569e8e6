"""What device and server must agree on: messages, draft tree, sampling, acceptance rules, traces. numpy only.

Enters: bytes of a call. Leaves: the verdict of a round, and its record.
Read first: `PROTOCOL.md`, then `wire.py`.
"""
