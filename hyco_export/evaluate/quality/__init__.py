"""The answers of systems to questions, and how good they are.

Enters: a prompt set, a run folder and a server. Leaves: a folder of traces, answers and scores.
Read first: `evaluation.py`.
"""
