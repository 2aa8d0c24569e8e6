"""How much of a tokenizer's raw speed is left when a keep set's tokens are counted, on this machine, in one run.

Raw is the tokenizer's own `encode_batch` on texts that lie in memory; counting also reads and decodes the files, tells
conversations apart and adds up. File by file, first the one, then the other: a machine that is busy slows both.
"""

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from hyco_export.core.data.files import data_files, read_conversations
from hyco_export.core.data.identity import identities
from hyco_export.evaluate.created_conversations import words_of, write_conversations
from hyco_export.nn.token_counts import BATCH_CHARACTERS, count_tokens

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
        """Not touched by what else the machine does."""
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
    nobody = identities([])
    raw, counting = [0.0, 0.0], [0.0, 0.0]
    conversations = tokens = 0
    for done, file in enumerate(files, 1):
        for texts in _batches(file):
            _timed(raw, partial(tokenizer.encode_batch, texts, add_special_tokens=False))
        stream = read_conversations(file)
        count = partial(count_tokens, stream, tokenizer, vocab_size, nobody, HELD_OUT_SHARE, lambda done: None)
        counts = _timed(counting, count)
        conversations += counts.read
        tokens += int(counts.counted.sum() + counts.held_out.sum())
        on_step("files encoded and counted", done, len(files))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_KB
    return CountingBench(conversations, tokens, raw[0], raw[1], counting[0], counting[1], peak)


def _timed(total: list[float], work: Callable[[], T]) -> T:
    """Run, and add wall seconds and CPU seconds of all threads to `total`."""
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
