"""The offline chain: one short file per stage, and the runner that makes them resumable."""
