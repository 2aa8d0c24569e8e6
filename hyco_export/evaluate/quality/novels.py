"""Novels to summarise: InfiniteBench's `longbook_sum_eng` (Zhang et al. 2024) as HELMET prepares it (Yen et al. 2025).

HELMET's rules: the order is that of a shuffle with seed 42; two other novels' summaries stand before the text as
examples; where all of that is longer than the limit the text loses its end, and a note says so. Two things differ:
HELMET cuts the text first by Llama 2's tokenizer, here the verifier's counts; the request is in words of our own,
with the same demands.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.set_files import find_file, json_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NOVELS = "infinitebench-sum"
ADDRESS = "hf://datasets/xinrongzhang2022/InfiniteBench/longbook_sum_eng.jsonl"
ROW_FORM = 'one JSON object a line: {"id": 0, "context": "the novel", "answer": ["a summary"]}'
SEED, NOVEL_COUNT, EXAMPLES = 42, 50, 2  # of HELMET; the paper takes the first 50
PROMPT_TOKENS = 31_368  # of a prompt: with 1,200 for an answer and 200 for the template 32,768, as HELMET's 32K set
LEAST_TOKENS = 16  # of a text that is worth a summary, the note counted
OMITTED = " [... the book goes on]"
REQUEST = (
    "Below is a novel. Summarise its plot and its characters in 1000 to 1200 words. Leave out themes, background and "
    "any judgement of your own."
)
AGAIN = "That was the novel. Write its summary."


class Novel(msgspec.Struct, frozen=True):
    """One question: the whole prompt and the expert's summaries."""

    id: str
    prompt: str
    summaries: tuple[str, ...]


class _Row(msgspec.Struct, frozen=True):
    id: int | str
    context: str
    answer: tuple[str, ...]


def shuffled_order(count: int) -> list[int]:
    """Places of `count` rows in the order of `datasets`' shuffle with HELMET's seed: numpy's permutation."""
    return [int(place) for place in np.random.default_rng(SEED).permutation(count)]


def read_novels(place: str | None, tokenizer: "PreTrainedTokenizerFast", prompt_tokens: int) -> Iterator[Novel]:
    """The first 50 in HELMET's order.

    Args:
        place: the file or its address; None for the data set's own on the Hub.
        prompt_tokens: of a prompt without the chat template, at most.

    Raises:
        HycoError: no such file, another layout, or no room for any of a novel.
    """
    path = find_file(place or ADDRESS)
    rows = list(json_rows(path, _Row, ROW_FORM))
    for number in shuffled_order(len(rows))[:NOVEL_COUNT]:
        row = rows[number]
        examples = _examples(rows, row)
        frame = len(_token_ends(tokenizer, novel_prompt("", examples)))
        if prompt_tokens - frame < LEAST_TOKENS:
            raise HycoError(
                f"--truncate is {prompt_tokens}, request and examples alone have {frame} tokens",
                f"give at least {frame + LEAST_TOKENS}",
            )
        text = shortened(row.context, tokenizer, prompt_tokens - frame)
        yield Novel(str(row.id), novel_prompt(text, examples), row.answer)


def novel_prompt(text: str, examples: str) -> str:
    """The user's message: the request, examples, the text, and the request once more."""
    return f"{REQUEST}\n\n{examples}{text}\n\n{AGAIN}"


def _examples(rows: list[_Row], asked: _Row) -> str:
    """Summaries of two other novels, as HELMET draws them; empty where there are no others."""
    others = [row for row in rows if row.id != asked.id]
    chosen = [others[number] for number in shuffled_order(len(others))[:EXAMPLES]]
    if not chosen:
        return ""
    shown = "\n\n".join(f"[a novel]\nSummary: {row.answer[0].strip()}" for row in chosen)
    return f"Summaries of two others:\n\n{shown}\n\nThe novel:\n\n"


def shortened(text: str, tokenizer: "PreTrainedTokenizerFast", limit: int) -> str:
    """The text's first `limit` tokens, the note that something is omitted counted among them."""
    ends = _token_ends(tokenizer, text)
    if len(ends) <= limit:
        return text
    return text[: ends[limit - len(_token_ends(tokenizer, OMITTED)) - 1]] + OMITTED


def _token_ends(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Where each token of a text ends, in characters."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [end for _, end in offsets]
