"""An answer's text while its tokens come in: detokenised without broken characters, and ended before a stop string.

Both are independent of how many tokens arrive together, so a streamed answer and a whole one are the same text.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what tokenizers write for bytes that are no whole character
CONTEXT_IDS = 16  # decoded again with new ones: what a token's text depends on lies within a few before it
WINDOW_IDS = 64  # decoded at once, before the oldest are left out


class ChatText(Protocol):
    """A chat template and its tokenizer. Called from several threads."""

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the answer begins.

        Raises:
            ProtocolError: code unsupported: the template refuses the conversation.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without control tokens."""


class Detokeniser:
    """Text of ids that come in one after another. What may be the beginning of a character is held back."""

    def __init__(self, text: ChatText) -> None:
        self._text = text
        self._window: list[int] = []  # the newest ids
        self._said = 0  # characters of the window's text that have been given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now, behind what was given out before."""
        new = ""
        for token in ids:  # one by one: else what is said of bytes that are no character would depend on the pieces
            self._window.append(token)
            decoded = self._text.decode(self._window)
            certain = decoded.rstrip(REPLACEMENT)
            new += certain[self._said :]
            self._said = max(self._said, len(certain))
            if len(self._window) > WINDOW_IDS:
                self._shorten(decoded)
        return new

    def end(self) -> str:
        """What is left when no more ids come; an incomplete character stays one."""
        rest = self._text.decode(self._window)[self._said :]
        self._said += len(rest)
        return rest

    def _shorten(self, decoded: str) -> None:
        """Leave out all but the newest ids, where these decode by themselves to the same, and all of it was said."""
        kept = self._window[-CONTEXT_IDS:]
        text = self._text.decode(kept)
        if text and self._said == len(decoded) and decoded.endswith(text):
            self._window, self._said = kept, len(text)


class StopStrings:
    """Ends a text before the first stop string in it. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain now, behind what was given out before; nothing once a stop string was found."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:  # the one that is complete first, of several the longest
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def end(self) -> str:
        """What was held back, now that no more comes."""
        rest, self._held = self._held, ""
        return rest


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
