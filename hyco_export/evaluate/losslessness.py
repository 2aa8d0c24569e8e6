"""Greedy losslessness: a system's text must be the server's own plain decoding, token for token. Pure.

With temperature 0 the exact rule commits only the verifier's argmax, so any difference is a fault: in positions, masks,
ring commits, or in what the server caches. (Two batch shapes may round a near-tie apart; on one machine in float32 this
was never seen, so it counts as a fault too.)
"""

from collections.abc import Mapping, Sequence

import msgspec

from hyco_export.evaluate.metrics import UNDISTURBED, Disturbances, disturbances
from hyco_export.runtime.trace import GenerationTrace

NO_TOKEN = -1  # one of the texts ended before the other


class Difference(msgspec.Struct, frozen=True):
    """The first place where a generation leaves the plain one."""

    prompt_id: str
    position: int  # index among the generated tokens
    expected_token: int
    found_token: int


class Losslessness(msgspec.Struct, frozen=True):
    """One system on one back end, greedy, against plain decoding."""

    system: str
    backend: str
    prompts: int
    max_new_tokens: int
    tokens: int  # compared
    mat: float
    differences: tuple[Difference, ...]
    disturbances: Disturbances = UNDISTURBED


def compare_texts(
    system: str,
    backend: str,
    plain: Mapping[str, Sequence[int]],
    traces: Sequence[GenerationTrace],
    max_new_tokens: int,
) -> Losslessness:
    """Compare `traces` with plain[prompt id], the server's own tokens.

    Raises:
        ValueError: nothing to compare, which would prove nothing.
        KeyError: a prompt that was not decoded plainly.
    """
    if not traces:
        raise ValueError(f"no generation of {system} on {backend} to compare")
    rounds = sum(len(trace.rounds) for trace in traces)
    verified = sum(len(record.tokens) for trace in traces for record in trace.rounds)
    found = [difference(trace.prompt_id, plain[trace.prompt_id], trace.tokens) for trace in traces]
    return Losslessness(
        system=system,
        backend=backend,
        prompts=len(traces),
        max_new_tokens=max_new_tokens,
        tokens=sum(len(trace.tokens) for trace in traces),
        mat=verified / rounds if rounds else float("nan"),
        differences=tuple(one for one in found if one is not None),
        disturbances=disturbances(traces),
    )


def difference(prompt_id: str, expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """The first position at which two token lists differ, an early end included; None when they are equal."""
    for position in range(max(len(expected), len(found))):
        wanted = expected[position] if position < len(expected) else NO_TOKEN
        seen = found[position] if position < len(found) else NO_TOKEN
        if wanted != seen:
            return Difference(prompt_id, position, wanted, seen)
    return None
