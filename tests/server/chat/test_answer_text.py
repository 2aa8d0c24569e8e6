"""Stop strings end a text in time, however it arrives."""

import pytest

from hyco_export.server.chat.answer_text import StopStrings


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["aab"], "aaaab", "aa"),
        (["abc", "b"], "xabc", "xa"),  # the one that is complete first
        (["c", "abc"], "xabc", "x"),  # complete at once: the longest
        (["\n\n", "###"], "a\nb##\n#", "a\nb##\n#"),
        (["ab"], "ab", ""),
        ([], "anything", "anything"),
    ],
)
def test_a_text_ends_before_its_first_stop_string_however_it_arrives(
    stops: list[str], text: str, expected: str
) -> None:
    for size in range(1, len(text) + 1):
        strings = StopStrings(stops)
        parts = [strings.push(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(parts) + strings.end() == expected
        assert strings.found == (expected != text)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["\n\nQ:"])
    assert [strings.push(part) for part in ("a", "\n", "\n", "Q", "x", "\n\n", "Q:", "y")] == [
        "a", "", "", "", "\n\nQx", "", "", "",
    ]  # fmt: skip
    assert strings.found and strings.end() == ""
