"""Conversations that nobody held, of UltraChat 200k's shape: for measuring where the real ones cannot be fetched.

Words are a tokenizer's own entries, drawn by Zipf's law, so that counts and coverage have the form of real text's; the
sentences mean nothing. Knows no tokenizer beyond its entries; equal seeds give equal files.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.conversations import Conversation, Message

SHARD_CONVERSATIONS = 2000
ZIPF_EXPONENT, ZIPF_SHIFT = 1.07, 2.7  # Zipf-Mandelbrot, as measured on English again and again
TURN_PAIRS = (2, 5)  # with the lengths below about 6 KB a conversation, as UltraChat 200k's 1.3 GB for 208,000
USER_WORDS = (15, 80)
ASSISTANT_WORDS = (120, 320)
SENTENCE_WORDS = (6, 20)
SHORTEST_WORD = 2  # single letters are the pieces that rare words fall into
PARAGRAPH_SENTENCES = 4
WORD_MARKS = ("▁", "Ġ")  # how sentencepiece and byte-level tokenizers write the space before a word


def words_of(entries: Iterable[str]) -> list[str]:
    """The words among a tokenizer's entries, in their order: frequent ones come first in a trained vocabulary."""
    starts = (entry[1:] for entry in entries if entry[:1] in WORD_MARKS)
    return [word for word in starts if len(word) >= SHORTEST_WORD and word.isalpha()]


def write_conversations(folder: Path, words: list[str], count: int, seed: int, on_count: Callable[[int], None]) -> None:
    """Write `count` conversations as JSONL shards into a new folder."""
    folder.mkdir(parents=True)
    encoder, made = msgspec.json.Encoder(), created(words, count, seed)
    for first in range(0, count, SHARD_CONVERSATIONS):
        with (folder / f"created-{first // SHARD_CONVERSATIONS:05d}.jsonl").open("wb") as stream:
            for _ in range(first, min(first + SHARD_CONVERSATIONS, count)):
                stream.write(encoder.encode(next(made)) + b"\n")
        on_count(min(first + SHARD_CONVERSATIONS, count))


def created(words: list[str], count: int, seed: int) -> Iterator[Conversation]:
    """`count` conversations from `words`, the first ones the most frequent."""
    generator = np.random.default_rng(seed)
    weights = (np.arange(len(words)) + ZIPF_SHIFT) ** -ZIPF_EXPONENT
    bounds = np.cumsum(weights) / weights.sum()

    def text(limits: tuple[int, int]) -> str:
        drawn = np.searchsorted(bounds, generator.random(int(generator.integers(*limits, endpoint=True))))
        return _sentences([words[min(int(index), len(words) - 1)] for index in drawn], generator)

    for number in range(count):
        messages: list[Message] = []
        for _ in range(int(generator.integers(*TURN_PAIRS, endpoint=True))):
            messages += [Message("user", text(USER_WORDS)), Message("assistant", text(ASSISTANT_WORDS))]
        yield Conversation(f"created/{number}", tuple(messages))


def _sentences(words: list[str], generator: np.random.Generator) -> str:
    """The words as sentences and paragraphs."""
    parts: list[str] = []
    while words:
        length = int(generator.integers(*SENTENCE_WORDS, endpoint=True))
        sentence, words = words[:length], words[length:]
        parts.append(" ".join([sentence[0].capitalize(), *sentence[1:]]) + ".")
    starts = range(0, len(parts), PARAGRAPH_SENTENCES)
    return "\n\n".join(" ".join(parts[start : start + PARAGRAPH_SENTENCES]) for start in starts)
