"""A language model as the judge of answers, behind any OpenAI-compatible endpoint.

Enters: answers. Leaves: a log of every reply, scores.
Read first: `judging.py`, then `endpoint.py`.
"""
