"""Runs generations of named systems with the device back ends of a run folder, each back end opened once and kept.

Joins the recipe's drafting, the server's facts and the device; the loop itself is `runtime.driver`.
"""

import hashlib
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from hyco_export.core.recipe import Drafting, Recipe
from hyco_export.evaluate.compatibility import require_room, require_same
from hyco_export.evaluate.run_artifacts import RunArtifacts
from hyco_export.evaluate.trials import Prompt
from hyco_export.runtime.devices.backends import open_device
from hyco_export.runtime.devices.device import Device
from hyco_export.runtime.drafters import ChainRule, Drafter, TreeRule
from hyco_export.runtime.driver import generate
from hyco_export.runtime.ports import Transport
from hyco_export.runtime.systems import Settings, find_system, make_drafter, make_policy, make_request
from hyco_export.runtime.trace import GenerationTrace
from hyco_export.runtime.wire import Sampling, ServerInfo

SEED_BYTES = 4


class DeviceRunner:
    """A `trials.SystemRunner` over the artifacts of a run and a server. Use as a context manager: devices are closed.

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
        chosen = find_system(system)
        if chosen.asks:
            require_room(self._info, prompt.id, len(prompt.ids), max_new_tokens)
        seed = prompt_seed(self._recipe.validation.seed + repeat, prompt.id)
        request = make_request(chosen, self._settings, prompt.id, sampling, seed, max_new_tokens)
        if request.head_digest:
            request = msgspec.structs.replace(request, first_rows=self._recipe.validation.first_reply_rows)
        policy = make_policy(chosen, self._settings)
        drafter = self._drafter(system, backend)
        trace = generate(prompt.ids, request, drafter, self._transport, self._clock, policy=policy)
        if trace.disturbed:
            require_same(self._transport.info(), self._info)
        return trace

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
    drafting = recipe.drafting
    return Settings(
        tree=tree_rule(drafting),
        specedge=specedge_rule(drafting),
        specedge_passes=drafting.specedge.passes,
        epsilon=recipe.validation.epsilon,
        server_steps=recipe.head.steps,
        head_digest=head_digest,
        vocab_size=info.vocab_size,
        stop_ids=frozenset(info.stop_ids),
        sled=ChainRule(drafting.sled.confidence, drafting.sled.longest),
        synera=ChainRule(drafting.synera.confidence, drafting.synera.longest),
        synera_unverified=drafting.synera.unverified,
        passes_ahead_count=drafting.specedge.passes_ahead == "counted",
        stop_needs_draw=drafting.stop_needs_draw,
        trace=trace,
    )


def tree_rule(drafting: Drafting) -> TreeRule:
    """The recipe's drafting as the scoring rule: an edge costs the log of the chain's assumed acceptance."""
    return TreeRule(
        math.log(drafting.chain_acceptance),
        drafting.budget,
        drafting.candidates_per_row,
        drafting.slm_temperature,
        drafting.second_pass_nodes,
    )


def specedge_rule(drafting: Drafting) -> TreeRule:
    """The same for the tree that the SLM grows alone."""
    own = drafting.specedge
    return TreeRule(math.log(own.edge_factor), drafting.budget, own.children_per_row, drafting.slm_temperature)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed of its own for every prompt, the same in all systems: with one seed, equal positions of all answers would
    be drawn with equal random numbers."""
    digest = hashlib.blake2b(f"{seed}:{prompt_id}".encode(), digest_size=SEED_BYTES).digest()
    return int.from_bytes(digest, "little")
