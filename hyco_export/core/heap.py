"""Gives memory that was freed back to the system.

A vocabulary of 262,144 entries is millions of small allocations: glibc keeps 250 MB of them after they are freed.
"""

import ctypes
import gc


def release_freed() -> None:
    """Return what no object holds any more; does nothing where the C library is not glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
