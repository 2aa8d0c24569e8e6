"""What a head reads of a `capture` artifact: the rows of its sequences, after a check that h is what the head wants.

Knows the artifact's files; training and comparing are others'.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.layout import FINAL_NORM_FILE

if TYPE_CHECKING:
    from transformers import Gemma4AssistantForCausalLM

    from hyco_export.nn.head.unroll import RootRows

SIDE_SEQUENCES = 8  # hundreds of tokens: enough to tell which side of the norm h comes from


@dataclass(frozen=True)
class Reading:
    """How captured sequences are read: the first `limit` tokens, `window` positions visible, h from this side."""

    limit: int
    window: int
    hidden_norm: HiddenNorm


def captured_rows(
    capture: Path, paths: Sequence[Path], head: "Gemma4AssistantForCausalLM", reading: Reading
) -> list["RootRows"]:
    """Response rows of captured sequences that have any, in their stored precision."""
    from hyco_export.nn.capture import load_capture
    from hyco_export.nn.final_norm import load_norm
    from hyco_export.nn.head.unroll import head_spans, response_rows

    norm = load_norm(capture / FINAL_NORM_FILE) if reading.hidden_norm == "pre" else None
    captures = [load_capture(path).cut(reading.limit) for path in paths]
    long_enough = [capture for capture in captures if capture.roots]
    return [response_rows(capture, head_spans(head.config), reading.window, norm) for capture in long_enough]


def require_norm_side(
    capture: Path, paths: Sequence[Path], head: "Gemma4AssistantForCausalLM", reading: Reading
) -> None:
    """h comes from the side of the verifier's final norm that the recipe names, and the head wants it from there.

    Raises:
        GateError: it does not; names the cause.
    """
    from hyco_export.nn.capture import load_capture
    from hyco_export.nn.final_norm import load_norm
    from hyco_export.nn.head.norm_side import OTHER, compare_readings, require_reading, require_side

    few = paths[:SIDE_SEQUENCES]
    require_side(load_capture(few[0]).h, load_norm(capture / FINAL_NORM_FILE), reading.hidden_norm)
    mirrored = replace(reading, hidden_norm=OTHER[reading.hidden_norm])
    both = [captured_rows(capture, few, head, side) for side in (reading, mirrored)]
    require_reading(compare_readings(head, *both), reading.hidden_norm)
