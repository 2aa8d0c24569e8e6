"""How soon drafting begins over a link: the whole window in the first reply, and the newest rows first.

Run: `make first-reply`. Sizes are the paper's (Gemma 4 26B-A4B: 2 x 2,816 B a round, 6,144 B a row, 1,024 rows); the
models are stubs that take no time, so what is left is the link's.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyco_export.device.drafters import Draft
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.link import PRESETS, LinkTransport, SkippingClock, find_link
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Source, Tree
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.support.scripted import STOP_ID, ScriptedSession, ToyLanguageModel

ROUND_BYTES, ROW_BYTES, WINDOW = 2 * 2_816, 6_144, 1_024
PROMPT = [2 + position % 200 for position in range(2_000)]
CHAIN = 4
TOKENS = 100
MODEL = ToyLanguageModel(vocab_size=256, stop_bias=-1e9)
FACTS = Facts(256, frozenset({STOP_ID}), 32_768, "head", WINDOW, 0)
INFO = wire.ServerInfo(1, "toy", "v", "t", 256, [STOP_ID], "head", "k", 64, 4096, 0, ["exact"], "thread-cpu")


class PaperSizes(ScriptedSession):
    """Hand-offs of the paper's sizes."""

    def handoff(self, root: int, count: int) -> wire.Handoff:
        half = bytes(ROUND_BYTES // 2)
        return wire.Handoff(half, half, bytes(ROW_BYTES * count), len(self.ids) - count)


class HalfRight:
    """Drafts chains of which the verifier takes two tokens."""

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        chain = MODEL.greedy(ids, CHAIN)
        chain[2] = (chain[2] + 1) % 256
        return Draft(Tree(tuple(chain), tuple(range(-1, CHAIN - 1)), (0.0,) * CHAIN, (Source.CHAIN,) * CHAIN))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass


@dataclass(frozen=True)
class Times:
    """Of one generation: when its first tree was drafted, when tokens were there, and what came down."""

    first_draft_ms: float
    tokens: tuple[int, ...]
    tenth_ms: float  # the tenth token
    total_ms: float
    first_reply_bytes: int
    down_bytes: int


def measure(link: str, first_rows: int, seed: int) -> Times:
    """One generation over a preset."""
    engine = Engine(lambda: PaperSizes(MODEL), FACTS, Limits(prompt_limit=4096))
    clock = SkippingClock(lambda: 0.0)
    transport = LinkTransport(LocalTransport(engine, INFO), find_link(link), seed, clock)
    request = Request(
        "toy", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, TOKENS, head_digest="head", first_rows=first_rows
    )
    trace = generate(PROMPT, request, HalfRight(), transport, clock)
    committed = 1 + np.cumsum([len(entry.tokens) for entry in trace.rounds])
    tenth = trace.rounds[int(np.searchsorted(committed, 10))]
    down = [call.traffic.payload_down_bytes for call in (*trace.primes, *trace.rounds)]
    return Times(
        first_draft_ms=trace.rounds[0].start_ms + trace.rounds[0].draft_ms,
        tokens=trace.tokens,
        tenth_ms=tenth.start_ms + tenth.draft_ms + tenth.wait_ms,
        total_ms=trace.total_ms,
        first_reply_bytes=down[0],
        down_bytes=sum(down),
    )


def main() -> None:
    """A table of links and part sizes; medians of five seeds."""
    columns = ("link", "rows", "first reply", "first draft", "ratio", "10th token", f"{TOKENS}th", "down")
    print(("{:>12}" * len(columns)).format(*columns))
    for link in PRESETS:
        whole_ms = 0.0
        for rows in (0, 256, 128, 64, 32):
            runs = [measure(link, rows, seed) for seed in range(5)]
            draft_ms, tenth_ms, total_ms = (
                float(np.median([getattr(run, name) for run in runs]))
                for name in ("first_draft_ms", "tenth_ms", "total_ms")
            )
            whole_ms = whole_ms or draft_ms
            cells = (
                link,
                rows or "all",
                f"{runs[0].first_reply_bytes / 1e3:.0f} kB",
                f"{draft_ms:.0f} ms",
                f"{draft_ms / whole_ms:.3f}",
                f"{tenth_ms:.0f} ms",
                f"{total_ms:.0f} ms",
                f"{runs[0].down_bytes / 1e6:.2f} MB",
            )
            print(("{:>12}" * len(cells)).format(*cells))


if __name__ == "__main__":
    sys.exit(main())
