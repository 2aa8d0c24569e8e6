"""The first reply's K/V window in parts, newest first, so that drafting begins before all of it has arrived.

The first reply holds the newest rows, every round's reply carries as many older ones until the window is complete. A
part follows from its round's number, so a repeated round carries the same one. Knows bytes and positions; no sessions.
"""

import msgspec

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire


class OlderRows(msgspec.Struct, frozen=True):
    """Rows of a window that come after the first reply: `kv` of positions `first` ..., `rows` of them in each part."""

    kv: bytes
    first: int
    row_bytes: int
    rows: int

    @property
    def parts(self) -> int:
        """Rounds until all are sent."""
        return -(-len(self.kv) // (self.rows * self.row_bytes))

    def attach(self, handoff: wire.Handoff, round_number: int) -> wire.Handoff:
        """The hand-off of a round (1, 2, ...) with that round's part, if there is one."""
        if round_number > self.parts:
            return handoff
        step = self.rows * self.row_bytes
        end = len(self.kv) - (round_number - 1) * step
        start = max(0, end - step)
        return msgspec.structs.replace(
            handoff, older_kv=self.kv[start:end], older_first=self.first + start // self.row_bytes
        )


def split_window(reply: wire.PrimeReply, first_rows: int) -> tuple[wire.PrimeReply, OlderRows | None]:
    """A reply with its newest `first_rows` rows, and the others; as it is where 0 or nothing to part."""
    handoff = reply.handoff
    if handoff is None or first_rows == 0:
        return reply, None
    count = reply.length - 1 - handoff.first_position  # rows end right before the root
    if count <= first_rows:
        return reply, None
    row_bytes = len(handoff.kv) // count
    cut = (count - first_rows) * row_bytes
    older = OlderRows(handoff.kv[:cut], handoff.first_position, row_bytes, first_rows)
    newest = msgspec.structs.replace(
        handoff, kv=handoff.kv[cut:], first_position=handoff.first_position + count - first_rows
    )
    return msgspec.structs.replace(reply, handoff=newest), older


def check_first_rows(request: wire.PrimeRequest) -> None:
    """Refuse a part of less than nothing.

    Raises:
        ProtocolError: code value_range.
    """
    if request.first_rows < 0:
        raise ProtocolError("value_range", f"first_rows is {request.first_rows}, it must be 0 (whole window) or more")
