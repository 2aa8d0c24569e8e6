"""A tokenizer whose tokens are words, with a chat template of marks around each turn: its ids can be read back."""

import re
from collections.abc import Sequence
from typing import Any

WORD = re.compile(r"\S+")


class WordTokenizer:
    """What evaluation needs of a tokenizer: offsets, a chat template, decoding. Words get ids as they are met."""

    name_or_path = "words"

    def __init__(self) -> None:
        self.words: list[str] = ["<stop>"]

    def __call__(self, text: str, **_: object) -> dict[str, Any]:
        found = list(WORD.finditer(text))
        ids = [self._id(match[0]) for match in found]
        return {"input_ids": ids, "offset_mapping": [match.span() for match in found]}

    def apply_chat_template(self, turns: Sequence[dict[str, str]], **_: object) -> list[int]:
        if any(turn["content"] == "refuse me" for turn in turns):
            raise ValueError("such a turn is not taken")
        text = " ".join(f"<{turn['role']}> {turn['content']}" for turn in turns)
        return list(self(f"{text} <answer>")["input_ids"])

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(self.words[number] for number in ids)

    def _id(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)
