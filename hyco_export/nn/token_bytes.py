"""The bytes that each entry of a vocabulary stands for, and any bytes spelled in a vocabulary's entries.

Knows the two kinds of tokenizers there are: pieces of text with byte fallback (Gemma, Llama) and letters for bytes
(GPT-2, SmolLM). Knows no model. Legend: V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from hyco_export.nn.tokenizer_file import TokenizerFile
from hyco_export.nn.vocabulary import (
    NO_TOKEN,
    byte_letters,
    falls_back,
    known_byte_ids,
    placeholder_ids,
    special_ids,
)

SPACE_MARK = "▁"  # a space in the vocabularies that fall back to bytes


@dataclass(frozen=True)
class Spelling:
    """A vocabulary by bytes.

    `entries` [V]: bytes of every id, None for specials, placeholders and ids without an entry.
    `byte_ids` [256], NO_TOKEN where a byte has none.
    """

    tokenizer: Tokenizer
    entries: Sequence[bytes | None]
    byte_ids: np.ndarray

    def spell(self, texts: Sequence[bytes]) -> list[list[int] | None]:
        """Ids of each byte string: the tokenizer's own where they spell exactly these bytes, else one id a byte; None
        where a byte has no id."""
        decoded = [_text(content) for content in texts]
        found = self.tokenizer.encode_batch([text or "" for text in decoded], add_special_tokens=False)
        return [
            ids if text is not None and self._bytes_of(ids := encoding.ids) == content else self._by_byte(content)
            for content, text, encoding in zip(texts, decoded, found, strict=True)
        ]

    def _bytes_of(self, ids: Sequence[int]) -> bytes | None:
        parts = [self.entries[token] if token < len(self.entries) else None for token in ids]
        return None if None in parts else b"".join(part for part in parts if part is not None)

    def _by_byte(self, content: bytes) -> list[int] | None:
        ids = self.byte_ids[list(content)].tolist()
        return None if NO_TOKEN in ids else ids


def spelling(tokenizer: TokenizerFile, vocab_size: int) -> Spelling:
    """The bytes of every id that the model has a row for."""
    backend = tokenizer.backend
    by_byte = known_byte_ids(backend)
    silent = {*special_ids(tokenizer, vocab_size).tolist(), *placeholder_ids(backend, vocab_size).tolist()}
    as_they_stand = backend.get_added_tokens_decoder()  # text, whatever the kind of tokenizer
    letters = None if falls_back(backend) else {letter: byte for byte, letter in byte_letters().items()}
    values = {int(token): byte for byte, token in enumerate(by_byte) if token != NO_TOKEN}
    entries: list[bytes | None] = []
    for token in range(vocab_size):
        if token in silent:
            entries.append(None)
        elif token in values:
            entries.append(bytes([values[token]]))
        elif token in as_they_stand:
            entries.append(as_they_stand[token].content.encode())
        else:
            entries.append(_piece_bytes(backend.id_to_token(token) or "", letters))
    return Spelling(backend, entries, by_byte)


def _piece_bytes(piece: str, letters: dict[str, int] | None) -> bytes | None:
    if letters is None:
        return piece.replace(SPACE_MARK, " ").encode()
    if not all(letter in letters for letter in piece):
        return None
    return bytes(letters[letter] for letter in piece)


def _text(content: bytes) -> str | None:
    """The text of bytes that are whole characters."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
