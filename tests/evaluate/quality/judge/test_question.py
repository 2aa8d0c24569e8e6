"""What the question-only judge is asked, and which replies hold a score."""

import pytest

from hyco_export.evaluate.quality.judge.question import LONGEST, Turn, question_messages, read_score


def test_question_and_answer_are_cut_at_the_papers_length() -> None:
    whole = question_messages([Turn("q" * 6_000, "a" * 6_000)])[1]["content"]
    cut = question_messages([Turn("q" * 6_001, "a" * 9_000)])[1]["content"]
    assert LONGEST == 6_000
    assert whole.count("[...]") == 0 and cut.count("[...]") == 2
    for text in (whole, cut):
        assert "q" * 6_000 in text and "q" * 6_001 not in text
        assert "a" * 6_000 in text and "a" * 6_001 not in text


def test_a_first_turn_is_judged_alone_and_a_second_with_its_first() -> None:
    first = question_messages([Turn("ask", "say")])[1]["content"]
    second = question_messages([Turn("ask", "say"), Turn("ask more", "say more")])[1]["content"]
    assert "earlier" not in first and "context" not in first
    places = [
        second.index(text) for text in ("\nask\n", "\nsay\n", "\nask more\n", "\nsay more\n", "last answer alone")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('{"score": 85}', 85.0),
        ('```json\n{"score": 92.5}\n```', 92.5),
        ('I had thought {"score": 10}, but: {"score": 20, "why": "short"} {not json}', 20.0),
        ("85", 85.0),
        ('<think>{"score": 10}? Better.</think>\n\n85', 85.0),
        (" 85/100.\n", 85.0),
        ('{"score": 0}', 0.0),
        ("100", 100.0),
    ],
)
def test_scores_that_are_read(reply: str, value: float) -> None:
    assert read_score(reply) == value


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("I cannot grade this.", "no score in the reply"),
        ("Between 70 and 80.", "no score in the reply"),
        ('{"score": "85"}', "no score in the reply"),
        ('{"score": true}', "no score in the reply"),
        ('{"score": null}', "no score in the reply"),
        ('{"score": 85', "no score in the reply"),
        ('{"score": 101}', "score 101 is not within 0 to 100"),
        ('{"score": -1}', "score -1 is not within 0 to 100"),
        ("999", "score 999 is not within 0 to 100"),
    ],
)
def test_replies_without_a_score_are_malformed(reply: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"malformed: {message}"):
        read_score(reply)
