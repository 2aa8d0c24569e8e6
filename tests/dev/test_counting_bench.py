"""Created conversations and the measurement over them: shapes and sums, no times."""

from hyco_export.core.data.readers import read_conversations
from hyco_export.dev.counting_bench import bench_counting, created, words_of, write_created
from tests.support.builders import small_tokenizer

WORDS = [f"word{'x' * i}" for i in range(400)]


def test_words_are_the_alphabetic_entries_after_a_space():
    assert words_of(["▁the", "ing", "Ġlist", "▁a", "▁12", "▁", "<0x41>", "▁가나"]) == ["the", "list", "가나"]


def test_created_conversations_have_ultrachats_shape_and_follow_the_seed():
    made = list(created(WORDS, 200, seed=3))
    assert made == list(created(WORDS, 200, seed=3)) != list(created(WORDS, 200, seed=4))
    assert len({conversation.id for conversation in made}) == 200
    assert {message.role for c in made for message in c.messages[1::2]} == {"assistant"}
    assert {len(c.messages) for c in made} == {4, 6, 8, 10}
    texts = " ".join(text for c in made for text in c.assistant_texts).lower().replace(".", "").split()
    assert texts.count(WORDS[0]) > 3 * texts.count(WORDS[20]) > 3 * texts.count(WORDS[200]) > 0


def test_the_measurement_counts_every_token_once(tmp_path):
    tokenizer = small_tokenizer()
    write_created(tmp_path / "created", tokenizer.backend_tokenizer, 30, lambda *_: None)
    result = bench_counting(tmp_path / "created", tokenizer.backend_tokenizer, lambda *_: None)
    texts = [text for c in read_conversations(tmp_path / "created") for text in c.assistant_texts]
    assert result.conversations == 30
    assert result.tokens == sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    assert min(result.raw_s, result.counting_s, result.ratio, result.cpu_ratio, result.peak_rss_bytes) > 0
