"""The verifier server: sessions, passes of the model, HTTP, access.

Enters: calls of devices. Leaves: verdicts and hand-offs.
Read first: `engine.py`; `http.py` brings it the calls, `passes/` computes for it.
"""
