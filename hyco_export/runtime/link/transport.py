"""Any transport as if over a link: its calls take what the link takes, and break where the link breaks.

Knows ports.Transport, the link and its clock; nothing of drafting. One transport serves one thread at a time.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from hyco_export.core.units import MS_PER_S
from hyco_export.errors import ProtocolError, UnreachableError
from hyco_export.runtime import wire
from hyco_export.runtime.link.clock import LinkClock
from hyco_export.runtime.link.model import Link, LinkDice
from hyco_export.runtime.ports import Traffic, Transport
from hyco_export.runtime.transport import Patience

Reply = TypeVar("Reply")


class LinkTransport:
    """Calls `inner` through a link.

    A round whose request or reply is lost is sent again after the pauses of `patience`, as `HttpTransport` does; other
    calls are not.

    Args:
        inner: does the call.
        link: what the network is like.
        seed: of everything random in it.
        clock: what the link's time is added to; give it to the driver, too.
        patience: retries of rounds.
    """

    def __init__(
        self, inner: Transport, link: Link, seed: int, clock: LinkClock, patience: Patience | None = None
    ) -> None:
        self._inner = inner
        self._dice = LinkDice(link, seed)
        self._link = link
        self._clock = clock
        self._started_s = clock()
        self._pauses_s = (patience or Patience()).pauses_s
        self.traffic = Traffic(0, 0, 0, 0)

    def info(self) -> wire.ServerInfo:
        return self._through(self._inner.info)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        return self._through(lambda: self._inner.prime(request))

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        repeats = 0
        for pause_s in self._pauses_s:
            try:
                return self._through(lambda: self._inner.verify(session, round_number, request), repeats)
            except UnreachableError:
                repeats = self.traffic.repeats + 1
                self._clock.wait(pause_s)
        return self._through(lambda: self._inner.verify(session, round_number, request), repeats)

    def close_session(self, session: str) -> None:
        self._through(lambda: self._inner.close_session(session))

    def _through(self, call: Callable[[], Reply], repeats: int = 0) -> Reply:
        """One exchange, after `repeats` tries; a refusal takes as long as a reply.

        Raises:
            UnreachableError: request or reply was lost. The server has done the work in the second case.
        """
        self.traffic = Traffic(0, 0, 0, 0, repeats)
        self._require_link()
        self._require(self._dice.breaks(), "the request was lost")
        try:
            reply = call()
        except ProtocolError:
            self._arrive(repeats)
            raise
        except UnreachableError:
            self._count(repeats)
            raise
        self._arrive(repeats)
        return reply

    def _count(self, repeats: int) -> None:
        traffic = self._inner.traffic
        self.traffic = msgspec.structs.replace(traffic, repeats=traffic.repeats + repeats)

    def _arrive(self, repeats: int) -> None:
        """What both directions take: the sizes are known only now; the server's own time is in between already."""
        self._count(repeats)
        up_ms = self._dice.up_ms(self.traffic.wire_up_bytes)
        self._clock.wait((up_ms + self._dice.down_ms(self.traffic.wire_down_bytes)) / MS_PER_S)
        self._require(self._dice.breaks(), "the reply was lost")
        self._require_link()

    def _require_link(self) -> None:
        """An outage swallows what is sent in it and what arrives in it; the device notices when it is over."""
        now_s = self._clock() - self._started_s
        over_s = self._dice.outage_over_s(now_s)
        if over_s > now_s:
            self._clock.wait(over_s - now_s)
            raise UnreachableError(f"link {self._link.name}: out for {over_s - now_s:.1f} s", "try again")

    def _require(self, broken: bool, what: str) -> None:
        if broken:
            self._clock.wait(self._link.rtt_ms / MS_PER_S)  # a reset is noticed when its packet comes back
            raise UnreachableError(f"link {self._link.name}: {what}", "try again")
