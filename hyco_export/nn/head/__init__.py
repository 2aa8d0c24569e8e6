"""The MTP head: its steps unrolled in float, its low-bit weights and their training, its static pass."""
