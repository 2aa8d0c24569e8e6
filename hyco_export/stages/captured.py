"""What later stages read of a `capture` artifact: answers, paths of captures, golden trees, texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hyco_export.core.data.conversations import Message
from hyco_export.core.golden import GoldenTree
from hyco_export.errors import ArtifactError

Split = Literal["calibration", "sampled", "validation"]
PROMPT_SPLITS: tuple[Split, ...] = ("calibration", "validation")
SPLITS: tuple[Split, ...] = ("calibration", "sampled", "validation")
ANSWERS_FILE = "answers.jsonl"
SEQUENCES_FOLDER = "sequences"
TREES_FOLDER = "trees"


class Answer(msgspec.Struct, frozen=True):
    """One line of answers.jsonl."""

    id: str
    split: Split
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str


def sequence_name(split: Split, index: int) -> str:
    """File name of the index-th capture of a split."""
    return f"{split}-{index:04d}.safetensors"


def sequence_paths(folder: Path, split: Split) -> list[Path]:
    """All captures of a split, in prompt order.

    Raises:
        ArtifactError: there are none.
    """
    found = sorted((folder / SEQUENCES_FOLDER).glob(f"{split}-*.safetensors"))
    if not found:
        raise ArtifactError(f"{folder} holds no {split} captures", "build it again: hyco-export capture")
    return found


def training_paths(folder: Path) -> list[Path]:
    """Captures that train the head: of the greedy and of the sampled answers.

    Raises:
        ArtifactError: there are none.
    """
    sampled = sorted((folder / SEQUENCES_FOLDER).glob("sampled-*.safetensors"))
    return [*sequence_paths(folder, "calibration"), *sampled]


def read_trees(folder: Path) -> list[GoldenTree]:
    """The golden trees of the validation answers, in prompt order.

    Raises:
        ArtifactError: one cannot be read.
    """
    paths = sorted((folder / TREES_FOLDER).glob("*.json"))
    try:
        return [msgspec.json.decode(path.read_bytes(), type=GoldenTree) for path in paths]
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{folder / TREES_FOLDER}: {error}", "build it again: hyco-export capture") from error


def read_answers(folder: Path, split: Split | None = None) -> list[Answer]:
    """Lines of answers.jsonl, of one split or all.

    Raises:
        ArtifactError: the file is missing or a line is not an answer.
    """
    path = folder / ANSWERS_FILE
    try:
        answers = [msgspec.json.decode(line, type=Answer) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "build it again: hyco-export capture") from error
    return [answer for answer in answers if split is None or answer.split == split]


def captured_texts(capture: Path, split: Split, limit: int) -> list[list[int]]:
    """Prompt and answer ids of a split, each at most `limit`."""
    return [(answer.prompt_ids + answer.answer_ids)[:limit] for answer in read_answers(capture, split)]


def long_texts(texts: Sequence[list[int]], rows: int) -> list[list[int]]:
    """Those that fill at least one pass of `rows` tokens.

    Raises:
        ArtifactError: there are none.
    """
    long_enough = [ids for ids in texts if len(ids) >= rows]
    if not long_enough:
        raise ArtifactError(
            f"no captured text has {rows} tokens or more ($.slm.rows)",
            "raise $.capture.max_new_tokens or lower $.slm.rows, then: hyco-export capture",
        )
    return long_enough
