"""What answers are worth: metrics, a judge's scores, and how sure a difference between two systems is.

Enters: the answers of an evaluation. Leaves: scores, contrasts with intervals.
Read first: `evaluation_folder.py`, then `contrasts.py`.
"""
