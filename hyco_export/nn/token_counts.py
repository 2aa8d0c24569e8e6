"""How often each token occurs in the assistant turns of conversations, counted as a stream.

Conversations whose id is excluded are skipped; a share of the rest, chosen by the id alone, is counted apart as
held-out text. Knows tokenizers and ids; not which tokens are kept. Legend: V vocabulary size.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerFast

from hyco_export.core.conversations import Conversation

BATCH_CONVERSATIONS = 512  # enough to occupy every core of the tokenizer, small enough to keep memory flat
HASH_BYTES = 8


@dataclass
class TokenCounts:
    """counted, held_out: int64 [V]; and how many conversations went where."""

    counted: np.ndarray
    held_out: np.ndarray
    counted_conversations: int = 0
    held_out_conversations: int = 0
    excluded_conversations: int = 0


def count_tokens(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    excluded_ids: Collection[str],
    held_out_share: float,
    on_batch: Callable[[int], None],
) -> TokenCounts:
    """Count the assistant turns; `on_batch` gets the number of conversations read so far."""
    counts = TokenCounts(np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64))
    read = 0
    for batch in _batches(conversations, BATCH_CONVERSATIONS):
        usable = [conversation for conversation in batch if conversation.id not in excluded_ids]
        held_out = [conversation for conversation in usable if is_held_out(conversation.id, held_out_share)]
        counted = [conversation for conversation in usable if not is_held_out(conversation.id, held_out_share)]
        counts.counted += _count_texts(counted, tokenizer, vocab_size)
        counts.held_out += _count_texts(held_out, tokenizer, vocab_size)
        counts.counted_conversations += len(counted)
        counts.held_out_conversations += len(held_out)
        counts.excluded_conversations += len(batch) - len(usable)
        read += len(batch)
        on_batch(read)
    return counts


def is_held_out(conversation_id: str, share: float) -> bool:
    """True for about `share` of all ids, always the same ones."""
    digest = hashlib.blake2b(conversation_id.encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little") < share * 2 ** (8 * HASH_BYTES)


def _count_texts(conversations: list[Conversation], tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> np.ndarray:
    """[V] occurrences in the assistant turns."""
    texts = [text for conversation in conversations for text in conversation.assistant_texts]
    total = np.zeros(vocab_size, dtype=np.int64)
    for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids = np.asarray(encoding.ids, dtype=np.int64)
        np.add.at(total, ids[ids < vocab_size], 1)
    return total


def _batches(conversations: Iterable[Conversation], size: int) -> Iterator[list[Conversation]]:
    source = iter(conversations)
    while batch := list(islice(source, size)):
        yield batch
