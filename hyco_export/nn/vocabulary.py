"""What a tokenizer's entries are: special tokens, byte tokens, placeholders, and the text of each id.

Knows tokenizers; not which entries a keep set takes, and no model. Legend: V vocabulary size.
"""

import re
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from hyco_export.core.keepset_choice import BYTE_TOKENS
from hyco_export.errors import CheckpointError
from hyco_export.nn.tokenizer_file import TokenizerFile

DECODED_AT_ONCE = 8192
NO_TOKEN = -1
PLACEHOLDER = re.compile(r"[<\[](\|)?(unused|reserved)\w*?_?\d+(\|)?[>\]]", re.IGNORECASE)


def special_ids(tokenizer: TokenizerFile, vocab_size: int) -> np.ndarray:
    """Sorted ids of the control tokens that the model has a row for (a tokenizer may know more: image marks).

    These are the tokens that the file marks special, those that the tokenizer configuration names, and whatever has a
    role: ends an answer, is written by the chat template. Placeholders without a role are none, although some files
    mark them so (Gemma's GGUF: 6,242 of its 6,249 control tokens); nor are added tokens without mark and role (Gemma's
    HTML tags, tabs and line ends): they are text, and counted.
    """
    marked = {token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    named = {tokenizer.backend.token_to_id(name) for name in tokenizer.special_names}
    called = marked | {token_id for token_id in named if token_id is not None}
    found = {i for i in called if not _is_placeholder(tokenizer.backend.id_to_token(i))} | tokenizer.role_ids
    return np.array(sorted(i for i in found if 0 <= i < vocab_size), dtype=np.int32)


def placeholder_ids(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Sorted ids that stand for no text: `<unused7>`, `<|reserved_special_token_7|>`, rows without an entry."""
    return np.flatnonzero([_is_placeholder(tokenizer.id_to_token(i)) for i in range(vocab_size)]).astype(np.int32)


def _is_placeholder(entry: str | None) -> bool:
    return entry is None or PLACEHOLDER.fullmatch(entry) is not None


def byte_ids(tokenizer: Tokenizer) -> np.ndarray:
    """[256] ids by byte value: the tokens that can spell any string.

    Raises:
        CheckpointError: the tokenizer has not all of them.
    """
    found = known_byte_ids(tokenizer)
    missing = np.flatnonzero(found == NO_TOKEN)
    if missing.size:
        raise CheckpointError(
            f"the verifier's tokenizer has no byte token <0x{missing[0]:02X}>: a keep set could not spell every string",
            "use a verifier whose tokenizer has byte fallback or byte-level pieces",
        )
    return found


def known_byte_ids(tokenizer: Tokenizer) -> np.ndarray:
    """[256] ids by byte value, NO_TOKEN where there is none (SmolLM2 lacks bytes that no UTF-8 text has).

    Tokenizers with byte fallback (Gemma, Llama) name them `<0x00>`..`<0xFF>`; byte-level ones (GPT-2) by a letter each.
    """
    fallback = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(BYTE_TOKENS)]
    if not falls_back(tokenizer):
        letters = byte_letters()
        fallback = [tokenizer.token_to_id(letters[byte]) for byte in range(BYTE_TOKENS)]
    return np.array([NO_TOKEN if token is None else token for token in fallback], dtype=np.int32)


def falls_back(tokenizer: Tokenizer) -> bool:
    """Does it spell by byte tokens what it has no piece for (Gemma); else its pieces are letters for bytes (GPT-2)."""
    return tokenizer.token_to_id("<0x20>") is not None


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # hundreds of MB that Gemma does without

    return bytes_to_unicode()


def token_texts(tokenizer: Tokenizer, vocab_size: int) -> Iterator[str]:
    """[V] decoded text of every single id; a lone byte of a longer character decodes to U+FFFD, an unused id to ""."""
    for start in range(0, vocab_size, DECODED_AT_ONCE):
        single = [[token_id] for token_id in range(start, min(start + DECODED_AT_ONCE, vocab_size))]
        yield from tokenizer.decode_batch(single, skip_special_tokens=False)
