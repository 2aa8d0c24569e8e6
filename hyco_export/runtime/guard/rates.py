"""How often a caller may call: one bucket of calls a caller, refilled at a steady rate. Knows no HTTP."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from hyco_export.errors import ProtocolError

CALLERS_KEPT = 4096  # addresses are many; the longest unseen is forgotten, and so is its debt


class _Bucket(msgspec.Struct):
    calls: float  # that may come at once
    at_s: float  # when that was true


class RateLimiter:
    """Lets every caller make `per_s` calls a second in the long run, `burst` at once.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, per_s: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now = now
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # longest unseen first

    def take(self, caller: str) -> None:
        """Count a call.

        Raises:
            ProtocolError: code rate: the bucket is empty. Nothing was done, the call can be sent again.
        """
        now_s = self._now()
        bucket = self._buckets.setdefault(caller, _Bucket(self._burst, now_s))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > CALLERS_KEPT:
            self._buckets.popitem(last=False)
        bucket.calls = min(self._burst, bucket.calls + (now_s - bucket.at_s) * self._per_s)
        bucket.at_s = now_s
        if bucket.calls < 1.0:
            rule = f"more than {self._per_s:g} calls a second, {self._burst} at once"
            wait_s = (1.0 - bucket.calls) / self._per_s
            raise ProtocolError("rate", rule, f"send it again in {math.ceil(wait_s)} s", wait_s)
        bucket.calls -= 1.0
