"""What a tokenizer's entries are: special tokens, byte tokens, placeholders, and the text of each id.

Knows tokenizers; not which entries a keep set takes, and no model. Legend: V vocabulary size.
"""

import re

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hyco_export.core.keepset_choice import BYTE_TOKENS
from hyco_export.errors import CheckpointError

PLACEHOLDER = re.compile(r"[<\[](\|)?(unused|reserved)\w*?_?\d+(\|)?[>\]]", re.IGNORECASE)


def special_ids(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> np.ndarray:
    """Sorted ids of the special tokens that the model has a row for (a tokenizer may know more: image marks).

    Placeholders are none, although some files mark them so (Gemma's GGUF: 6,242 of its 6,249 control tokens); nor are
    added tokens without that mark (Gemma's HTML tags, tabs and line ends): they are text, and counted.
    """
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = (marked | set(tokenizer.all_special_ids)) - set(placeholder_ids(tokenizer, vocab_size).tolist())
    return np.array(sorted(token_id for token_id in found if token_id < vocab_size), dtype=np.int32)


def placeholder_ids(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> np.ndarray:
    """Sorted ids that stand for no text: `<unused7>`, `<|reserved_special_token_7|>`, rows without an entry."""
    vocabulary = tokenizer.get_vocab()
    named = {token_id for token, token_id in vocabulary.items() if PLACEHOLDER.fullmatch(token)}
    absent = set(range(vocab_size)) - set(vocabulary.values())
    return np.array(sorted(token_id for token_id in named | absent if token_id < vocab_size), dtype=np.int32)


def byte_ids(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """[256] ids by byte value: the tokens that can spell any string.

    Tokenizers with byte fallback (Gemma, Llama) name them `<0x00>`..`<0xFF>`; byte-level ones (GPT-2) by a letter each.

    Raises:
        CheckpointError: the tokenizer has neither.
    """
    vocabulary = tokenizer.get_vocab()
    fallback = [f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)]
    letters = bytes_to_unicode()
    byte_level = [letters[byte] for byte in range(BYTE_TOKENS)]
    for names in (fallback, byte_level):
        if all(name in vocabulary for name in names):
            return np.array([vocabulary[name] for name in names], dtype=np.int32)
    missing = next(name for name in fallback if name not in vocabulary)
    raise CheckpointError(
        f"the verifier's tokenizer has no byte token {missing}: a keep set could not spell every string",
        "use a verifier whose tokenizer has byte fallback or byte-level pieces",
    )


def token_texts(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> list[str]:
    """[V] decoded text of every single id; a lone byte of a longer character decodes to U+FFFD, an unused id to ""."""
    single = [[token_id] for token_id in range(vocab_size)]
    return tokenizer.backend_tokenizer.decode_batch(single, skip_special_tokens=False)
