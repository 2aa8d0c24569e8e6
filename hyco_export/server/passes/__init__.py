"""Forward passes of the verifier in torch, for the rows of several sessions at once.

Enters: roots, trees and prompts. Leaves: logits and hand-off values; accepted rows stay in the cache.
Read first: `verifier.py`.
"""
