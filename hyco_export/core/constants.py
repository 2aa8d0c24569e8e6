"""Conversion factors between units, and limits that both sides of the wire keep and recipes are checked against."""

MS_PER_S = 1e3
BYTES_PER_MB = 1_000_000
BITS_PER_MBIT = 1e6

COLDEST, HOTTEST = 0.01, 100.0  # temperatures other than 0; outside, float32 scores overflow or lose all differences
NODE_LIMIT = 64  # nodes of a draft tree, the root not counted: twice the paper's budget of 32
