"""The first hand-off's K/V window in parts: PRIME's reply brings the newest rows, the next rounds the older ones, so
that drafting begins before the whole window has arrived (`wire.PrimeRequest.first_rows`)."""

import msgspec

from hyco_export.protocol import wire


class OlderRows(msgspec.Struct, frozen=True):
    """Rows of the first window that the first reply left out, sent newest first: `kv` of positions `first` ..., `rows`
    of them in each part."""

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
    """A reply with its newest `first_rows` rows, and the others; the reply as it is where `first_rows` is 0 or it holds
    no more."""
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
