"""Rows of token ids and the batches made of them. Legend: B rows of a batch, T tokens of its longest row."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedTokenizerFast

from hyco_export.nn.tiny.corpus import Dialogue, Message
from hyco_export.nn.tiny.tokenizer import PAD_ID

MAX_ROW_TOKENS = 176
"""Longer dialogues are cut: four in a hundred, and only their last sentence."""

BATCH_TOKENS = 1024
"""Tokens per step, padding included: small steps learn more per second than large ones at this size."""


@dataclass(frozen=True)
class Row:
    """One conversation as ids; `answer_start` is the index of the first token of the last answer."""

    ids: tuple[int, ...]
    answer_start: int


def dialogue_rows(dialogues: Sequence[Dialogue], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Each dialogue through the chat template, cut at MAX_ROW_TOKENS."""
    rows = []
    for dialogue in dialogues:
        ids = conversation_ids(dialogue.messages, tokenizer)
        prompt = prompt_ids(dialogue.messages[:-1], tokenizer)
        rows.append(Row(tuple(ids[:MAX_ROW_TOKENS]), min(len(prompt), MAX_ROW_TOKENS)))
    return rows


def conversation_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids of finished turns."""
    return cast(list[int], tokenizer.apply_chat_template(list(messages), return_dict=False))


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids up to and including the opening of the model's turn."""
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return cast(list[int], ids)


def shuffled_batches(rows: Sequence[Row], seed: int) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length (little padding), in a new order in every pass over the rows."""
    generator = random.Random(seed)
    while True:
        order = sorted(rows, key=lambda row: (len(row.ids) // 8, generator.random()))
        batches = list(ordered_batches(order))
        generator.shuffle(batches)
        yield from batches


def ordered_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Cut the rows, in their order, into batches of at most BATCH_TOKENS tokens after padding."""
    batch: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row.ids))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch, longest = [], len(row.ids)
        batch.append(row)
    if batch:
        yield batch


def padded_ids(batch: Sequence[Row]) -> torch.Tensor:
    """Token ids [B, T], padded on the right (a causal model never looks there)."""
    longest = max(len(row.ids) for row in batch)
    return torch.tensor([[*row.ids, *[PAD_ID] * (longest - len(row.ids))] for row in batch])


def answer_mask(batch: Sequence[Row]) -> torch.Tensor:
    """Boolean [B, T]: True where the token belongs to the last answer."""
    longest = max(len(row.ids) for row in batch)
    return torch.tensor([[row.answer_start <= index < len(row.ids) for index in range(longest)] for row in batch])
