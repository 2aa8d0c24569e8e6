"""What the SLM reads of a `capture` artifact: whole texts, prompt and answer. Hand-offs are the head's affair."""

from collections.abc import Sequence
from pathlib import Path

from hyco_export.errors import ArtifactError
from hyco_export.stages.capture import Split, read_answers


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
