"""A named system of ours as a contestant: the driver, a transport, and whatever server stands behind it."""

import time
from collections.abc import Sequence

from hyco_export.errors import HycoError
from hyco_export.evaluate.peers.comparison import Answer
from hyco_export.evaluate.trials import GREEDY
from hyco_export.runtime import wire
from hyco_export.runtime.drafters import NullDrafter
from hyco_export.runtime.driver import Request, generate
from hyco_export.runtime.ports import Transport


class CloudMtp:
    """The server drafts with its own head; the device sends nothing but what it believes is committed."""

    name = "hyco-export cloud-mtp"

    def __init__(self, transport: Transport, steps: int) -> None:
        self._transport = transport
        self._steps = steps

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """From the request to the last token, everything on the way included.

        Raises:
            HycoError: a call was disturbed, so that the time says nothing.
        """
        request = Request(self.name, "", GREEDY, wire.EXACT, 0, max_new_tokens, "server", self._steps)
        start_s = time.perf_counter()
        trace = generate(ids, request, NullDrafter(), self._transport)
        disturbed = [call for call in trace.disturbed if call is not trace.primes[0]]  # others may take long in between
        if disturbed:
            raise HycoError(
                f"{len(disturbed)} calls were sent again or made for a lost session: the time is that of an outage",
                "run the command again; the server's log says what ended its sessions",
            )
        return Answer(trace.tokens, time.perf_counter() - start_s, len(trace.rounds))
