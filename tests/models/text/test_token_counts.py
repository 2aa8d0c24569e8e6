"""Counting as a stream: batches, held-out text, exclusion, and a count that is killed and goes on."""

import numpy as np
import pytest

from hyco_export.core.data.conversations import Conversation, Message, identities
from hyco_export.models.text import token_counts
from hyco_export.models.text.token_counts import count_tokens, is_held_out
from tests.support.builders import small_tokenizer

TEXTS = ("Brackets nest.", "A list keeps order.", "What does a list keep?", "한국어", "")
NOBODY = identities([])


def conversations(count):
    return [
        Conversation(f"c{i}", (Message("user", f"Question {i}?"), Message("assistant", TEXTS[i % len(TEXTS)])))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(token_counts, "BATCH_CHARACTERS", 100)


def by_hand(tokenizer, chosen):
    ids = [token for item in chosen for token in tokenizer.encode(item.messages[1].content, add_special_tokens=False)]
    return np.bincount(np.array(ids, dtype=np.int64), minlength=len(tokenizer))


def test_every_turn_lands_in_its_count_whatever_the_batches(tokenizer, small_batches):
    items, read = conversations(50), []
    counts = count_tokens(items, tokenizer.backend_tokenizer, len(tokenizer), identities(items[:7]), 0.3, read.append)
    held_out = [item for item in items[7:] if is_held_out(item.id, 0.3)]
    counted = [item for item in items[7:] if not is_held_out(item.id, 0.3)]
    assert 0 < len(held_out) < 43
    assert counts.counted.tolist() == by_hand(tokenizer, counted).tolist()
    assert counts.held_out.tolist() == by_hand(tokenizer, held_out).tolist()
    assert counts.counted_ids == [item.id for item in counted]
    assert counts.held_out_ids == [item.id for item in held_out]
    assert counts.excluded_ids == [item.id for item in items[:7]]
    assert read[-1] == 50 and read == sorted(read) and len(read) > 5


def test_ids_beyond_the_models_rows_are_left_out(tokenizer):
    items = conversations(5)
    counts = count_tokens(items, tokenizer.backend_tokenizer, 270, NOBODY, 0.0, lambda done: None)
    assert counts.counted.tolist() == by_hand(tokenizer, items)[:270].tolist()


def test_nothing_to_count_is_an_empty_count(tokenizer):
    counts = count_tokens([], tokenizer.backend_tokenizer, len(tokenizer), NOBODY, 0.1, lambda done: None)
    assert counts.read == 0 and not counts.counted.any()


def test_a_killed_count_goes_on_where_it_was_saved(tokenizer, small_batches, monkeypatch, tmp_path):
    monkeypatch.setattr(token_counts, "SAVE_INTERVAL_S", 0.0)
    items, state, seen = conversations(60), tmp_path / "counting", []

    def die(done):
        if done > 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_tokens(items, tokenizer.backend_tokenizer, len(tokenizer), NOBODY, 0.3, die, state)
    assert [path.name for path in tmp_path.iterdir()] == ["counting"]
    saved = state.read_bytes()
    counts = count_tokens(items, tokenizer.backend_tokenizer, len(tokenizer), NOBODY, 0.3, seen.append, state)
    assert seen[0] > 20  # the first ones were not counted again
    whole = count_tokens(items, tokenizer.backend_tokenizer, len(tokenizer), NOBODY, 0.3, lambda done: None)
    assert counts.counted.tolist() == whole.counted.tolist()
    assert counts.held_out.tolist() == whole.held_out.tolist()
    assert counts.counted_ids == whole.counted_ids
    assert list(tmp_path.iterdir()) == []
    state.write_bytes(saved[:-9])  # cut short: counted from the start
    again = count_tokens(items, tokenizer.backend_tokenizer, len(tokenizer), NOBODY, 0.3, lambda done: None, state)
    assert again.counted.tolist() == whole.counted.tolist()
