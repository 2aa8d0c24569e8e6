"""How many rows, positions and samples the stages take: what they keep to, and what their estimates count with."""

PACKED_ROWS = 512  # short sequences share a pass (2.4 times as fast at 55 rows each); a long one has it alone
ROOTS_PER_SEQUENCE = 8  # of the head compared in each validation sequence: with 60 of them and 4 steps 1,920 ids
SAVED_EVERY = 10  # of the compared positions, for the emulator, where a draft takes half a second
SAMPLES_PER_GRAPH = 4  # of the SLM's; the emulator takes seconds to minutes for one
