"""Factors between the units that names end in."""

MS_PER_S = 1e3
BYTES_PER_MB = 1_000_000
BITS_PER_MBIT = 1e6
