"""The systems that can be run, by name: each is a configuration of the same parts (HyCo, Table 2), not a code path.

Knows which drafter, rule and draft side belong to a name. A new system is a row in `SYSTEMS`, and at most one new
drafter class with a row in `DRAFTERS`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from hyco_export.errors import HycoError
from hyco_export.runtime import wire
from hyco_export.runtime.devices.device import Device
from hyco_export.runtime.drafters import Drafter, HybridDrafter, NullDrafter, SpecEdgeDrafter, TreeRule
from hyco_export.runtime.driver import Request
from hyco_export.runtime.feeds import HeadFeed, SlmFeed
from hyco_export.runtime.rules import EPSILON, RULES

NOTHING = "nothing"  # the drafter of systems whose device drafts nothing


class System(msgspec.Struct, frozen=True):
    """One named configuration. `draft_side` "server" lets the verifier's own head draft there."""

    name: str
    summary: str
    drafter: str  # of DRAFTERS
    rule: str  # of rules.RULES
    draft_side: wire.DraftSide = "device"

    @property
    def needs_device(self) -> bool:
        """Does it draft with the device's models."""
        return self.drafter != NOTHING

    @property
    def needs_handoff(self) -> bool:
        """Does its device run the verifier's head."""
        return self.needs_device and DRAFTERS[self.drafter].runs_head


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("plain", "the verifier alone, one token a round", NOTHING, "exact"),
        System("cloud-mtp", "the server drafts with its own head, exact rule", NOTHING, "exact", draft_side="server"),
        System("specedge", "several SLM passes on the device, exact rule", "specedge", "exact"),
        System("specedge-eps", "several SLM passes on the device, epsilon rule", "specedge", "epsilon"),
        System("hyco-exact", "head and one SLM pass on the device, exact rule", "hybrid", "exact"),
        System("hyco", "head and one SLM pass on the device, epsilon rule", "hybrid", "epsilon"),
        System("hyco-2p", "head and two SLM passes on the device, epsilon rule", "hybrid-2p", "epsilon"),
    )
}


class Settings(msgspec.Struct, frozen=True):
    """What the systems of one run share: the recipe's drafting and the server's facts."""

    tree: TreeRule  # of the hybrid drafters
    specedge: TreeRule
    specedge_passes: int
    epsilon: float  # for systems with the epsilon rule
    server_steps: int  # K, for systems that draft on the server
    head_digest: str  # key of the head artifact, for systems whose device runs the head
    stop_ids: frozenset[int]
    trace: bool = False  # ask for what each round was judged by


def find_system(name: str) -> System:
    """The system called `name`.

    Raises:
        HycoError: no such system; the hint lists the known ones.
    """
    if name not in SYSTEMS:
        known = ", ".join(f"{system.name} ({system.summary})" for system in SYSTEMS.values())
        raise HycoError(f"unknown system {name!r}", f"known ones: {known}")
    return SYSTEMS[name]


def make_drafter(system: System, settings: Settings, device: Device | None) -> Drafter:
    """The system's drafter; it may serve one generation after another. `device` may be None where none is needed."""
    if not system.needs_device:
        return NullDrafter()
    if device is None:
        raise HycoError(f"system {system.name} drafts on the device, but none was opened", "choose a device back end")
    return DRAFTERS[system.drafter].make(device, settings)


def make_request(
    system: System, settings: Settings, prompt_id: str, sampling: wire.Sampling, seed: int, max_new_tokens: int
) -> Request:
    """What a generation under this system asks of the server."""
    on_server = system.draft_side == "server"
    return Request(
        system=system.name,
        prompt_id=prompt_id,
        sampling=sampling,
        acceptance=wire.Acceptance(system.rule, settings.epsilon if EPSILON in RULES[system.rule].options else 1.0),
        seed=seed,
        max_new_tokens=max_new_tokens,
        draft_side=system.draft_side,
        draft_steps=settings.server_steps if on_server else 0,
        head_digest=settings.head_digest if system.needs_handoff else "",
        trace=settings.trace,
        stop_ids=tuple(sorted(settings.stop_ids)),
    )


class DrafterRow(NamedTuple):
    """How a drafter is made. `runs_head`: it needs the hand-off of every reply."""

    make: Callable[[Device, Settings], Drafter]
    runs_head: bool = False


def _hybrid(device: Device, settings: Settings, passes: int = 1) -> Drafter:
    head, slm = HeadFeed(device.head, device.handoff), SlmFeed(device.slm)
    return HybridDrafter(head, slm, device.keep_ids, settings.tree, settings.stop_ids, passes)


def _specedge(device: Device, settings: Settings) -> Drafter:
    slm = SlmFeed(device.slm)
    return SpecEdgeDrafter(slm, device.keep_ids, settings.specedge, settings.stop_ids, settings.specedge_passes)


DRAFTERS: dict[str, DrafterRow] = {
    "hybrid": DrafterRow(_hybrid, runs_head=True),
    "hybrid-2p": DrafterRow(partial(_hybrid, passes=2), runs_head=True),
    "specedge": DrafterRow(_specedge),
}
