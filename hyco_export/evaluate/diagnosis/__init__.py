"""What is wrong with a server, a device or an artifact, by name, from golden positions.

Enters: golden values and what was observed. Leaves: findings.
Read first: `diagnose.py`, then `finding.py`.
"""
