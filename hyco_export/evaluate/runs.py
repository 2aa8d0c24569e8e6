"""Runs generations of named systems over prompts, with the device back ends of a run folder opened once each."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from hyco_export.core.recipe import Recipe
from hyco_export.device.backends import Device, open_device
from hyco_export.device.drafters import Drafter
from hyco_export.device.driver import Generation, finish
from hyco_export.device.interfaces import Transport
from hyco_export.device.systems import Settings, find_system, make_drafter, make_policy, make_request
from hyco_export.evaluate.connect import OnStep, Prompt, RunArtifacts, require_room, require_same
from hyco_export.evaluate.gates import Losslessness, compare_texts
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.wire import Sampling, ServerInfo

Asked = TypeVar("Asked")  # a prompt, or a question of several turns
SEED_BYTES = 4
PLAIN = "plain"  # the server alone, one token a round
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0)
WARM_UP_TOKENS = 4  # enough for one round of every part


class DeviceRunner:
    """A `SystemRunner` over the artifacts of a run and a server. Use as a context manager: devices are closed.

    Args:
        artifacts: the run's device artifacts.
        recipe: its drafting, lengths and seed.
        transport: the server.
        info: what the server said of itself.
        trace: ask for what each round was judged by: larger replies, and traces that can be replayed.
        clock: seconds; the link's, where the transport goes over a modelled one.
    """

    def __init__(
        self,
        artifacts: RunArtifacts,
        recipe: Recipe,
        transport: Transport,
        info: ServerInfo,
        trace: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._artifacts = artifacts
        self._recipe = recipe
        self._transport = transport
        self._info = info
        self._clock = clock
        self._settings = run_settings(recipe, artifacts.head_key, info, trace)
        self._devices: dict[str, Device] = {}
        self._drafters: dict[tuple[str, str], Drafter] = {}

    def generate(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> GenerationTrace:
        """One generation; the same prompt, sampling and `repeat` give the same draws in every system.

        Raises:
            HycoError: no such system or back end.
            ServerError: the server went away, came back as another one, or has no room for the prompt and its answer.
        """
        trace = finish(self.start(system, backend, prompt, sampling, max_new_tokens, repeat))
        if trace.disturbed:
            self.require_same_server()
        return trace

    def start(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> Generation:
        """The same generation before its first step, for a caller that looks at every round.

        Raises:
            HycoError: no such system or back end.
            ServerError: the server has no room for the prompt and its answer.
        """
        chosen = find_system(system)
        if chosen.asks:
            require_room(self._info, prompt.id, len(prompt.ids), max_new_tokens)
        seed = prompt_seed(self._recipe.validation.seed + repeat, prompt.id)
        request = make_request(chosen, self._settings, prompt.id, sampling, seed, max_new_tokens)
        if request.head_digest:
            request = msgspec.structs.replace(request, first_rows=self._recipe.validation.first_reply_rows)
        policy = make_policy(chosen, self._settings)
        drafter = self._drafter(system, backend)
        return Generation(prompt.ids, request, drafter, self._transport, self._clock, policy)

    def prepare(self, system: str, backend: str) -> None:
        """Open what the system drafts with: the first generation does not wait for it."""
        self._drafter(system, backend)

    def require_same_server(self) -> None:
        """Raises ServerError: after an outage another server answers than before it, or none."""
        require_same(self._transport.info(), self._info)

    def _drafter(self, name: str, backend: str) -> Drafter:
        key = (name, backend)
        if key not in self._drafters:
            system = find_system(name)
            device = self._device(backend) if system.needs_device else None
            self._drafters[key] = make_drafter(system, self._settings, device)
        return self._drafters[key]

    def _device(self, backend: str) -> Device:
        if backend not in self._devices:
            self._devices[backend] = open_device(self._artifacts.root, backend, self._recipe.target)
        return self._devices[backend]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for device in self._devices.values():
            device.close()


def run_settings(recipe: Recipe, head_digest: str, info: ServerInfo, trace: bool = False) -> Settings:
    """What all systems of a run share."""
    return Settings(
        drafting=recipe.drafting,
        epsilon=recipe.validation.epsilon,
        server_steps=recipe.head.steps,
        head_digest=head_digest,
        vocab_size=info.vocab_size,
        stop_ids=frozenset(info.stop_ids),
        trace=trace,
        rows_ms=tuple(info.rows_ms),
    )


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for every prompt, the same in all systems: with one seed, equal positions of all answers would
    be drawn with equal random numbers."""
    digest = hashlib.blake2b(f"{seed}:{prompt_id}".encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(digest, "little")


class SystemRunner(Protocol):
    """Runs one generation of a named system with a device back end."""

    def generate(
        self, system: str, backend: str, prompt: Prompt, sampling: Sampling, max_new_tokens: int, repeat: int = 0
    ) -> GenerationTrace: ...


def turns(systems: Sequence[str], prompts: Sequence[Asked]) -> Iterator[tuple[str, Asked]]:
    """Who answers what next: all systems answer a prompt before the next, so that a slow machine slows all alike; the
    system that goes first changes from prompt to prompt."""
    for done, prompt in enumerate(prompts):
        first = done % len(systems)
        for system in (*systems[first:], *systems[:first]):
            yield system, prompt


def warm_up(runner: SystemRunner, systems: Sequence[str], backend: str, prompt: Prompt, sampling: Sampling) -> None:
    """One round of every part, unmeasured."""
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
    label = f"prompts answered by {len(systems)} system{'s' if len(systems) > 1 else ''}"
    for done, (system, prompt) in enumerate(turns(systems, prompts), 1):
        traces[system].append(runner.generate(system, backend, prompt, sampling, max_new_tokens))
        if done % len(systems) == 0:
            on_step(label, done // len(systems), len(prompts))
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
