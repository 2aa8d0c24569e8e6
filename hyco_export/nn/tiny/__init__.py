"""The embedded tiny family: its text, tokenizer, training and packed checkpoints.

Knows how to make three small checkpoints that belong together (verifier, multi-token-prediction head, small language
model) from the documentation of the Python standard library. Knows nothing of the export stages that consume them.
`python -m hyco_export.nn.tiny OUT_DIR` trains all of it again.
"""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""The trained family: `verifier/`, `head/`, `slm/`, `conversations.jsonl`, `MODEL_CARD.md`."""
