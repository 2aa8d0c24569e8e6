"""Tokenizers, vocabularies and token counts.

Enters: tokenizer files and conversations. Leaves: token ids, roles of tokens, counts.
Read first: `tokenizer.py`.
"""
