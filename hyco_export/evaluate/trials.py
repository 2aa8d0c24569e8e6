"""The generations a validation needs: systems interleaved per prompt, and greedy texts beside plain decoding.

Drives whatever runs a system (`SystemRunner`); knows no device, no server and no limits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from hyco_export.evaluate.losslessness import Losslessness, compare_texts
from hyco_export.runtime.trace import GenerationTrace
from hyco_export.runtime.wire import Sampling

PLAIN = "plain"  # the server alone, one token a round
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0)
WARM_UP_TOKENS = 4  # enough for one round of every part

OnStep = Callable[[str, int, int], None]  # label, done, total


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as the verifier reads it, chat template applied."""

    id: str
    ids: tuple[int, ...]


class SystemRunner(Protocol):
    """Runs one generation of a named system with a device back end."""

    def generate(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> GenerationTrace: ...


def turns(systems: Sequence[str], prompts: Sequence[Prompt]) -> Iterator[tuple[str, Prompt]]:
    """All systems answer a prompt before the next one comes, so that a machine that slows down slows all of them; the
    system that goes first changes from prompt to prompt."""
    for done, prompt in enumerate(prompts):
        first = done % len(systems)
        for system in (*systems[first:], *systems[:first]):
            yield system, prompt


def warm_up(runner: SystemRunner, systems: Sequence[str], backend: str, prompt: Prompt, sampling: Sampling) -> None:
    """One round of every part, which nobody measures."""
    for system in systems:
        runner.generate(system, backend, prompt, sampling, WARM_UP_TOKENS)


def run_interleaved(
    runner: SystemRunner,
    systems: Sequence[str],
    backend: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    max_new_tokens: int,
    on_step: OnStep,
) -> dict[str, list[GenerationTrace]]:
    """Generations by system, in `turns`, after a warm-up."""
    warm_up(runner, systems, backend, prompts[0], sampling)
    traces: dict[str, list[GenerationTrace]] = {system: [] for system in systems}
    for done, (system, prompt) in enumerate(turns(systems, prompts), 1):
        traces[system].append(runner.generate(system, backend, prompt, sampling, max_new_tokens))
        if done % len(systems) == 0:
            on_step(f"prompts answered by {', '.join(systems)}", done // len(systems), len(prompts))
    return traces


def plain_texts(
    runner: SystemRunner, backend: str, prompts: Sequence[Prompt], max_new_tokens: int, on_step: OnStep
) -> dict[str, tuple[int, ...]]:
    """The server's own greedy tokens by prompt id: every round sends an empty tree."""
    texts = {}
    for done, prompt in enumerate(prompts):
        texts[prompt.id] = runner.generate(PLAIN, backend, prompt, GREEDY, max_new_tokens).tokens
        on_step("prompts decoded plainly", done + 1, len(prompts))
    return texts


def check_greedy(
    runner: SystemRunner,
    system: str,
    backend: str,
    prompts: Sequence[Prompt],
    plain: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    on_step: OnStep,
) -> Losslessness:
    """Greedy texts of a system on a back end against the plain ones, both cut at `max_new_tokens`."""
    traces = []
    for done, prompt in enumerate(prompts):
        traces.append(runner.generate(system, backend, prompt, GREEDY, max_new_tokens))
        on_step(f"greedy texts, {backend}", done + 1, len(prompts))
    shortened = {prompt_id: tokens[:max_new_tokens] for prompt_id, tokens in plain.items()}
    return compare_texts(system, backend, shortened, traces, max_new_tokens)
