"""Which process of a launch (`accelerate launch`, `torchrun`) this is, told by the launcher's variables alone.

Imports nothing heavy.
"""

import os

RANK = "RANK"  # number of this process; absent where there is only one
WORLD_SIZE = "WORLD_SIZE"  # how many there are


def is_launched() -> bool:
    """Is this one of several processes?"""
    return RANK in os.environ


def is_shared() -> bool:
    """Are there others?"""
    return int(os.environ.get(WORLD_SIZE, "1")) > 1


def is_main() -> bool:
    """The one that prints, and does what the others cannot help with."""
    return int(os.environ.get(RANK, "0")) == 0
