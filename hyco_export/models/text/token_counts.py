"""Counts each token in the assistant turns of conversations, as a stream, on all cores.

Conversations of the calibration and validation prompts are left out. A share of the rest, chosen by their ids alone, is
held out and counted separately. A long count saves its state in a file and resumes from it.

Legend: V vocabulary size.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from hyco_export.core.data.conversations import Conversation, Identities

BATCH_CHARACTERS = 1 << 20  # hundreds of texts: enough for every core, and about 60 MB of encodings
HASH_BYTES = 8
SAVE_INTERVAL_S = 20.0  # a killed count loses no more


@dataclass
class TokenCounts:
    """`counted`, `held_out`: int64 [V]; ids of the conversations of each, and of those left out."""

    counted: np.ndarray
    held_out: np.ndarray
    counted_ids: list[str] = field(default_factory=list)
    held_out_ids: list[str] = field(default_factory=list)
    excluded_ids: list[str] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Conversations read so far."""
        return len(self.counted_ids) + len(self.held_out_ids) + len(self.excluded_ids)


@dataclass(frozen=True)
class _Batch:
    """Conversations of about BATCH_CHARACTERS, divided into counted, held-out and excluded ones."""

    counted: list[Conversation]
    held_out: list[Conversation]
    excluded: list[Conversation]


def count_tokens(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    vocab_size: int,
    excluded: Identities,
    held_out_share: float,
    on_batch: Callable[[int], None],
    state: Path | None = None,
) -> TokenCounts:
    """Count the tokens of assistant turns. The tokenizer encodes a batch while the one before is added up.

    Args:
        excluded: conversations to leave out.
        held_out_share: share of the others that is counted separately.
        on_batch: called with the number of conversations read so far.
        state: file of the saved state, from which an interrupted count resumes; removed at the end.
    """
    counts = _load(state, vocab_size)
    saved = time.monotonic()
    batches = _batches(islice(conversations, counts.read, None), excluded, held_out_share)
    for batch, encodings in _encoded_ahead(tokenizer, batches):
        _add(counts, batch, encodings)
        on_batch(counts.read)
        if state is not None and time.monotonic() - saved > SAVE_INTERVAL_S:
            _save(state, counts)
            saved = time.monotonic()
    if state is not None:
        state.unlink(missing_ok=True)
    return counts


def is_held_out(conversation_id: str, share: float) -> bool:
    """True for about `share` of all ids, and always for the same ones."""
    digest = hashlib.blake2b(conversation_id.encode(), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little") < share * 2 ** (8 * HASH_BYTES)


def _encoded_ahead(tokenizer: Tokenizer, batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, list[Encoding]]]:
    """Each batch with the encodings of its texts; the next one is encoded meanwhile, in a thread."""
    with ThreadPoolExecutor(max_workers=1) as encoder:

        def begin(batch: _Batch) -> Future[list[Encoding]]:
            texts = _texts(batch.counted) + _texts(batch.held_out)
            return encoder.submit(tokenizer.encode_batch_fast, texts, add_special_tokens=False)

        waiting: tuple[_Batch, Future[list[Encoding]]] | None = None
        for batch in batches:
            before, waiting = waiting, (batch, begin(batch))
            if before is not None:
                yield before[0], before[1].result()
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _texts(conversations: Iterable[Conversation]) -> list[str]:
    return [text for conversation in conversations for text in conversation.assistant_texts]


def _add(counts: TokenCounts, batch: _Batch, encodings: list[Encoding]) -> None:
    first_held_out = len(_texts(batch.counted))
    for total, part in ((counts.counted, encodings[:first_held_out]), (counts.held_out, encodings[first_held_out:])):
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in part), dtype=np.int64)
        total += np.bincount(ids[ids < len(total)], minlength=len(total))
    counts.counted_ids += [conversation.id for conversation in batch.counted]
    counts.held_out_ids += [conversation.id for conversation in batch.held_out]
    counts.excluded_ids += [conversation.id for conversation in batch.excluded]


def _batches(conversations: Iterable[Conversation], excluded: Identities, share: float) -> Iterator[_Batch]:
    batch, characters = _Batch([], [], []), 0
    for conversation in conversations:
        if conversation in excluded:
            batch.excluded.append(conversation)
        elif is_held_out(conversation.id, share):
            batch.held_out.append(conversation)
        else:
            batch.counted.append(conversation)
        characters += sum(len(message.content) for message in conversation.messages)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = _Batch([], [], []), 0
    yield batch


class _State(msgspec.Struct, frozen=True):
    """A count in progress: the arrays' bytes, and the ids."""

    counted: bytes
    held_out: bytes
    counted_ids: list[str]
    held_out_ids: list[str]
    excluded_ids: list[str]


def _save(path: Path, counts: TokenCounts) -> None:
    """Write the state beside `path`, then rename it."""
    arrays = (counts.counted.tobytes(), counts.held_out.tobytes())
    state = _State(*arrays, counts.counted_ids, counts.held_out_ids, counts.excluded_ids)
    partial = path.with_name(f"{path.name}.part")
    partial.write_bytes(msgspec.msgpack.encode(state))
    partial.rename(path)


def _load(path: Path | None, vocab_size: int) -> TokenCounts:
    """The count in the file; an empty one where the file is missing or not complete."""
    try:
        state = msgspec.msgpack.decode(b"" if path is None else path.read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError):
        return TokenCounts(np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64))
    counted, held_out = (np.frombuffer(part, dtype=np.int64).copy() for part in (state.counted, state.held_out))
    return TokenCounts(counted, held_out, state.counted_ids, state.held_out_ids, state.excluded_ids)
