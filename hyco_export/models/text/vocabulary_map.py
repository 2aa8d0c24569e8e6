"""Maps a verifier's vocabulary to that of a drafter with another tokenizer, by the bytes of their tokens.

A token of both can be drafted. All other tokens of the verifier can only be read, as several tokens of the drafter.

Legend: V the verifier's vocabulary, C mapped tokens.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hyco_export.core.token_bridge import TokenBridge
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.text.tokenizer import TokenizerFile
from hyco_export.models.text.vocabulary import Spelling, spelling


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with the number of rows of its model."""

    tokenizer: TokenizerFile
    size: int


def map_vocabularies(
    verifier: Vocabulary,
    drafter: Vocabulary,
    kept: Collection[int] | None = None,
    specials: Mapping[str, str] | None = None,
) -> TokenBridge:
    """The map between two vocabularies.

    Args:
        kept: verifier ids that may be drafted; None: all.
        specials: special tokens with the same meaning, by the verifier's name. The verifier's other specials are read
            as the text of their names.

    Raises:
        CheckpointError: no token in common, or the drafter cannot spell a blank.
        RecipeError: a special is not in its vocabulary.
    """
    ours, theirs = spelling(verifier.tokenizer, verifier.size), spelling(drafter.tokenizer, drafter.size)
    partners = _partners(verifier, drafter, specials or {})
    pieces = _reading(verifier, ours, theirs, partners)
    allowed = set(range(verifier.size)) if kept is None else set(map(int, kept))
    pairs = dict(sorted(_pairs(ours, theirs, allowed)))  # drafter id -> verifier id
    pairs |= {there: here for here, there in partners.items() if here in allowed}
    if not pairs:
        raise CheckpointError(
            "the SLM's vocabulary has no token in common with the keep set", "give another SLM, or a larger keep set"
        )
    drafter_ids = np.array(sorted(pairs), dtype=np.int32)
    lengths = np.array([len(ids) for ids in pieces])
    return TokenBridge(
        verifier_ids=np.array([pairs[token] for token in drafter_ids.tolist()], dtype=np.int32),
        drafter_ids=drafter_ids,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        pieces=np.concatenate(pieces).astype(np.int32),
    )


def _pairs(ours: Spelling, theirs: Spelling, allowed: Collection[int]) -> Iterable[tuple[int, int]]:
    """(drafter id, verifier id) of every byte string that both have a token for.

    Where a side has several tokens for it (a byte token and a letter), the one that its tokenizer writes is taken.
    """
    here, there = _by_bytes(ours), _by_bytes(theirs)
    for content in here.keys() & there.keys():
        if here[content] in allowed:
            yield there[content], here[content]


def _by_bytes(side: Spelling) -> dict[bytes, int]:
    """The id of every byte string: a byte token only where there is no other, and the first of several others."""
    byte_tokens = set(side.byte_ids.tolist())
    found: dict[bytes, int] = {}
    for token, content in enumerate(side.entries):
        if content and (content not in found or found[content] in byte_tokens):
            found[content] = token
    return found


def _partners(verifier: Vocabulary, drafter: Vocabulary, specials: Mapping[str, str]) -> dict[int, int]:
    """Ids of the specials with the same meaning: verifier's id -> drafter's id."""
    return {
        _special(verifier, name, "verifier"): _special(drafter, partner, "SLM") for name, partner in specials.items()
    }


def _special(side: Vocabulary, name: str, role: str) -> int:
    token = side.tokenizer.backend.token_to_id(name)
    if token is None:
        raise RecipeError(f"$.slm.bridge.specials: the {role}'s tokenizer has no token {name!r}", "correct the name")
    return token


def _reading(verifier: Vocabulary, ours: Spelling, theirs: Spelling, partners: Mapping[int, int]) -> list[list[int]]:
    """The drafter's ids for every verifier id [V]: its partner, or ids of the entry's bytes (of a special: its name's).

    Bytes without a token of the drafter (parts of characters, invalid ones) are read as a blank.
    """
    backend = verifier.tokenizer.backend
    contents = [content or (backend.id_to_token(token) or " ").encode() for token, content in enumerate(ours.entries)]
    blank, *spelled = theirs.spell([b" ", *contents])
    if not blank:
        raise CheckpointError("the SLM's tokenizer has no token for a blank", "give another SLM")
    return [[partners[token]] if token in partners else ids or blank for token, ids in enumerate(spelled)]
