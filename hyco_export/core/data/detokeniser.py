"""Text of token ids that come in one after another, without broken characters."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what tokenizers write for bytes that are no whole character
HELD_IDS = 32  # held back at most: no character has as many tokens


class Detokeniser:
    """Text that grows by ids. What may be the beginning of a character is held back.

    The text is the same however many ids come together. What an id adds is seen beside the ids before it, since a
    decoder may treat a text's first one otherwise. `tokenizers`' own DecodeStream does the same, and raises where
    later bytes make an earlier one invalid.

    Args:
        decode: the text of some ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: list[int] = []  # the newest ids whose text was given out
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now, behind what was given out before."""
        return "".join(map(self._step, ids))  # one by one: else bytes that are no character would depend on the pieces

    def end(self) -> str:
        """What is left when no more ids come; an incomplete character stays one."""
        rest, self._held = self._added(), []
        return rest

    def _step(self, token: int) -> str:
        self._held.append(token)
        added = self._added()
        if len(self._held) < HELD_IDS and (not added or added.endswith(REPLACEMENT)):
            return ""
        self._known, self._held = self._held, []
        return added

    def _added(self) -> str:
        known, whole = self._decode(self._known), self._decode([*self._known, *self._held])
        if whole.startswith(known):
            return whole[len(known) :]
        return self._decode(self._held)  # bytes that make the ones before invalid, whose text was given out
