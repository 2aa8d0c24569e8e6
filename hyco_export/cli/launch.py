"""Which process of an `accelerate launch` this is, told by the launcher's variables alone: imports nothing heavy."""

import os

RANK = "RANK"  # number of this process; absent where there is only one


def is_launched() -> bool:
    """Is this one of several processes?"""
    return RANK in os.environ


def is_main() -> bool:
    """The one that prints, and does what the others cannot help with."""
    return int(os.environ.get(RANK, "0")) == 0
