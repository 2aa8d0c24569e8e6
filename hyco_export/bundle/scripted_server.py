"""A server that answers from captured text: hand-offs as they were captured, verdicts by a script.

Golden conversations are held with it: its verdicts lead along the text, beside the chain, and to an SLM leaf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hyco_export.bundle.spec import Exchange
from hyco_export.core.golden import golden_text_file
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, KvRows
from hyco_export.errors import ArtifactError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, depths, path_to
from hyco_export.protocol.wire import Handoff, Traffic

ROUNDS = ("text", "sibling", "leaf", "text", "text")  # verdicts of a session, in order; the last one ends it
SESSION_NAME = "golden"
SERVER_MS = 1.0  # what it says a call took


@dataclass(frozen=True)
class Text:
    """Token ids [T], and the hand-off at each of them in the head's encodings: e, h [T, H], K/V rows."""

    ids: list[int]
    e: np.ndarray
    h: np.ndarray
    rows: KvRows

    def handoff(self, root: int, first: int, older: tuple[int, int] | None, spec: HandoffSpec) -> Handoff:
        """For the root at a position: rows first ... root - 1, and older ones of a range of positions."""
        packed = b"" if older is None else spec.pack_rows(self._cut(*older))
        return Handoff(
            e=self.e[root].tobytes(),
            h=self.h[root - 1].tobytes(),
            kv=spec.pack_rows(self._cut(first, root)),
            first_position=first,
            older_kv=packed,
            older_first=older[0] if older else 0,
        )

    def _cut(self, first: int, last: int) -> KvRows:
        return KvRows(
            {name: rows[first:last] for name, rows in self.rows.k.items()},
            {name: rows[first:last] for name, rows in self.rows.v.items()},
        )


def read_text(head: Path, spec: HandoffSpec, length: int, without: frozenset[int]) -> Text:
    """The captured texts of `convert-head` one after the other, again and again up to `length` tokens.

    Ids of `without` are left out. A row keeps the rotary embedding of where it was captured: to a graph it is one more
    row of bytes, and every side of the comparison reads the same ones.

    Raises:
        ArtifactError: a text is missing or damaged.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for number in count():
        path = head / golden_text_file(number)
        if number and not path.is_file():
            break
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"{path} cannot be read: {error}", "build it again: hyco-export convert-head"
            ) from error
        taken = ~np.isin(stored["ids"], list(without))
        for name, values in stored.items():
            parts.setdefault(name, []).append(values[taken])
    joined = {name: np.concatenate(values) for name, values in parts.items()}
    places = np.arange(length) % len(joined["ids"])
    levels = {name: encoding.quantize(joined[name][places]) for name, encoding in spec.encodings.items()}
    rows = KvRows({t: levels[f"k.{t}"] for t in LAYER_TYPES}, {t: levels[f"v.{t}"] for t in LAYER_TYPES})
    return Text(joined["ids"][places].tolist(), levels["e"], levels["h"], rows)


class ScriptedServer:
    """A `Transport` that answers from a text by a script and keeps what travels.

    Args:
        text: what it commits, and every hand-off.
        spec: the hand-off's layout.
        stop: the id that ends the session; None: a verifier without one, whose session ends at its length.
        keep: writes two bodies and gives their paths.
        rounds: kinds of verdicts, in order; the last one ends the session.
    """

    def __init__(
        self,
        text: Text,
        spec: HandoffSpec,
        stop: int | None,
        keep: Callable[[str, bytes], str],
        rounds: Sequence[str] = ROUNDS,
    ) -> None:
        self.traffic = Traffic(0, 0, 0, 0)
        self.exchanges: list[Exchange] = []
        self._text, self._spec, self._stop, self._keep = text, spec, stop, keep
        self._rounds = rounds
        self._ids: list[int] = []
        self._oldest = self._part = 0

    def info(self) -> wire.ServerInfo:
        raise AssertionError("a generation does not ask")

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        root = len(request.prompt)
        self._ids = [*request.prompt, self._text.ids[root]]
        self._part = request.first_rows or min(root, self._spec.window)
        self._oldest = root - min(self._part, root, self._spec.window)
        self._end = max(0, root - self._spec.window)
        handoff = self._text.handoff(root, self._oldest, None, self._spec)
        reply = wire.PrimeReply(1, SESSION_NAME, self._ids[-1], len(self._ids), "", handoff, SERVER_MS)
        self._note("POST", "/v1/sessions", request, reply)
        return reply

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        path = self._path(self._rounds[round_number - 1], request)
        last = round_number == len(self._rounds)
        old_root = len(self._ids) - 1
        tokens = [request.tokens[row] for row in path]
        follower = self._text.ids[len(self._ids) + len(tokens)]
        tokens.append(self._stop if last and self._stop is not None else follower)
        self._ids += tokens
        root = len(self._ids) - 1
        handoff = None if last else self._text.handoff(root, old_root, self._older(), self._spec)
        finished = "" if not last else "length" if self._stop is None else "stop"
        drawn = [True] * len(path)
        reply = wire.VerifyReply(1, round_number, list(path), drawn, tokens, finished, handoff, 0, SERVER_MS)
        self._note("POST", f"/v1/sessions/{session}/rounds/{round_number}", request, reply)
        return reply

    def close_session(self, session: str) -> None:
        self._note("DELETE", f"/v1/sessions/{session}", None, None)

    def _older(self) -> tuple[int, int] | None:
        """The next part of the first window, if there is one left."""
        last = self._oldest
        if last <= self._end:
            return None
        self._oldest = max(self._end, last - self._part)
        return self._oldest, last

    def _path(self, kind: str, request: wire.VerifyRequest) -> tuple[int, ...]:
        """Rows of the tree that are accepted."""
        tokens, parents = request.tokens, request.parents
        if kind == "sibling":  # below another child of the root than the chain's
            others = [row for row, parent in enumerate(parents) if parent == ROOT and tokens[row] != self._stop][1:]
            below = [row for row, parent in enumerate(parents) if parent in others and tokens[row] != self._stop]
            return path_to(parents, (below or others or [ROOT])[-1])
        if kind == "leaf":  # the deepest of the last rows: a node of the SLM, whose K/V the pass did not compute
            deep = depths(parents)
            rows = (row for row, token in enumerate(tokens) if token != self._stop)  # a stop would end the session
            return path_to(parents, max(rows, key=lambda row: (deep[row], row), default=ROOT))
        row = ROOT
        path: list[int] = []
        while True:
            wanted = self._text.ids[len(self._ids) + len(path)]
            found = [n for n, parent in enumerate(parents) if parent == row and tokens[n] == wanted]
            if not found:
                return tuple(path)
            row = found[0]
            path.append(row)

    def _note(self, method: str, path: str, request: msgspec.Struct | None, reply: msgspec.Struct | None) -> None:
        number = len(self.exchanges)
        bodies = [b"" if body is None else wire.encode(body) for body in (request, reply)]
        names = [
            self._keep(f"{number:02}.{what}", body) for what, body in zip(("request", "reply"), bodies, strict=True)
        ]
        self.exchanges.append(Exchange(method, path, *names))
