"""How fast a keep set's tokens are counted, as a share of the tokenizer's own speed on the same machine and texts.

The tokenizer's own speed is that of `encode_batch` on texts in memory. Counting also reads and parses the files, leaves
out held-out conversations and adds up. The two alternate file by file, so that other load slows both alike.
"""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer

from hyco_export.core.data.conversations import Conversation, Message, identities
from hyco_export.core.data.readers import data_files, read_conversations
from hyco_export.models.text.token_counts import BATCH_CHARACTERS, count_tokens

# ---- created conversations of UltraChat 200k's shape, where the real ones cannot be fetched

SHARD_CONVERSATIONS = 2000
ZIPF_EXPONENT, ZIPF_SHIFT = 1.07, 2.7  # Zipf-Mandelbrot, as measured on English again and again
TURN_PAIRS = (2, 5)  # with the lengths below about 6 KB a conversation, as UltraChat 200k's 1.3 GB for 208,000
USER_WORDS = (15, 80)
ASSISTANT_WORDS = (120, 320)
SENTENCE_WORDS = (6, 20)
SHORTEST_WORD = 2  # letters: single ones are pieces of rare words
PARAGRAPH_SENTENCES = 4
WORD_MARKS = ("▁", "Ġ")  # how sentencepiece and byte-level tokenizers write the space before a word


def words_of(entries: Iterable[str]) -> list[str]:
    """The words among a tokenizer's entries, in their order: a trained vocabulary has the frequent ones first."""
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


T = TypeVar("T")
OnStep = Callable[[str, int, int], None]
SEED = 20261011
HELD_OUT_SHARE = 0.1  # the recipe's default
BYTES_PER_KB = 1024  # Linux gives ru_maxrss in these


class CountingBench(msgspec.Struct, frozen=True):
    """Seconds of wall clock and of all cores' work; `ratio`s are counting's speed over raw speed."""

    conversations: int
    tokens: int
    raw_s: float
    raw_cpu_s: float
    counting_s: float
    counting_cpu_s: float
    peak_rss_bytes: int

    @property
    def ratio(self) -> float:
        return self.raw_s / self.counting_s

    @property
    def cpu_ratio(self) -> float:
        """By CPU time, which other load on the machine does not change."""
        return self.raw_cpu_s / self.counting_cpu_s

    @property
    def summary(self) -> dict[str, Any]:
        """All of it, by name."""
        return {**msgspec.structs.asdict(self), "ratio": self.ratio, "cpu_ratio": self.cpu_ratio}


def write_created(folder: Path, tokenizer: Tokenizer, count: int, on_step: OnStep) -> None:
    """Write created conversations of the tokenizer's own words into a new folder."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = words_of(sorted(vocabulary, key=vocabulary.__getitem__))
    write_conversations(folder, words, count, SEED, lambda done: on_step("conversations created", done, count))


def bench_counting(path: Path, tokenizer: Tokenizer, on_step: OnStep) -> CountingBench:
    """Measure over the conversations of a file or folder.

    Raises:
        RecipeError: they cannot be read.
    """
    files = data_files(path)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    none_excluded = identities([])
    raw, counting = [0.0, 0.0], [0.0, 0.0]
    conversations = tokens = 0
    for done, file in enumerate(files, 1):
        for texts in _batches(file):
            _timed(raw, partial(tokenizer.encode_batch, texts, add_special_tokens=False))
        stream = read_conversations(file)
        count = partial(count_tokens, stream, tokenizer, vocab_size, none_excluded, HELD_OUT_SHARE, lambda done: None)
        counts = _timed(counting, count)
        conversations += counts.read
        tokens += int(counts.counted.sum() + counts.held_out.sum())
        on_step("files encoded and counted", done, len(files))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_KB
    return CountingBench(conversations, tokens, raw[0], raw[1], counting[0], counting[1], peak)


def _timed(total: list[float], work: Callable[[], T]) -> T:
    """The result of `work`; wall seconds and CPU seconds of all threads are added to `total`."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    total[0] += time.perf_counter() - wall_s
    total[1] += time.process_time() - cpu_s
    return result


def _batches(path: Path) -> Iterator[list[str]]:
    """Assistant texts in batches of the size that counting uses."""
    texts: list[str] = []
    characters = 0
    for conversation in read_conversations(path):
        texts += conversation.assistant_texts
        characters += sum(len(message.content) for message in conversation.messages)
        if characters >= BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    yield texts
