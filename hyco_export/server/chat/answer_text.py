"""The text of a chat: what makes ids of a conversation and text of ids, and stop strings that end an answer.

Where an answer ends does not depend on how much text arrives together, so a streamed answer and a whole one are the
same text.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class ChatText(Protocol):
    """A chat template and its tokenizer. Called from several threads."""

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the answer begins.

        Raises:
            ProtocolError: code unsupported: the template refuses the conversation.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without control tokens."""


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
