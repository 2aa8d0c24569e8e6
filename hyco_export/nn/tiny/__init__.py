"""The embedded tiny family: its text, tokenizer, training and packed checkpoints.

Knows how to make three small checkpoints that belong together (verifier, multi-token-prediction head, small language
model) from the documentation of the Python standard library. Knows nothing of the export stages that consume them.
The trained family lies in `checkpoints/`; `hyco-export train-tiny OUT` trains all of it again.
"""
