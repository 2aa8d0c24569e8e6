"""The systems that can be run, by name: each is a configuration of the same parts (HyCo, Table 2), not a code path.

A system names its drafter, acceptance rule, draft side and offload policy. A new system is a row in `SYSTEMS`, and at
most one new class each with a row in `DRAFTERS`, `POLICIES` or `acceptance.RULES`; the driver stays as it is. A new
drafter is a module of `drafters/` with its options in `core.recipe.Drafting`, which reaches it whole.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hyco_export.core.deferred import Deferred
from hyco_export.core.recipe import Drafting
from hyco_export.device.interfaces import Request
from hyco_export.errors import HycoError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import EPSILON, RULES

if TYPE_CHECKING:
    from hyco_export.device.backends import Device
    from hyco_export.device.drafters import Drafter
    from hyco_export.device.offload import OffloadPolicy

NOTHING = "nothing"  # the drafter of systems whose device drafts nothing
EVERYTHING, CONFIDENT, ALONE = "everything", "confident", "alone"  # offload policies


class System(msgspec.Struct, frozen=True):
    """One named configuration.

    `draft_side` and `draft_scope` are PRIME's: where the verifier's own head drafts, and over what.
    """

    name: str
    summary: str
    drafter: str  # of DRAFTERS
    rule: str  # of acceptance.RULES
    draft_side: wire.DraftSide = "device"
    draft_scope: wire.DraftScope = "full"
    offload: str = EVERYTHING  # of POLICIES: what the verifier is asked

    @property
    def needs_device(self) -> bool:
        """Does it draft with the device's models."""
        return self.drafter != NOTHING

    @property
    def needs_handoff(self) -> bool:
        """Does its device run the verifier's head."""
        return self.needs_device and DRAFTERS[self.drafter].runs_head

    @property
    def drafts_with_slm_alone(self) -> bool:
        """Are all its drafts the SLM's. The paper gives some of these systems the full vocabulary."""
        return self.needs_device and not self.needs_handoff and self.draft_side == "device"

    @property
    def asks(self) -> bool:
        """Does it use a server at all."""
        return self.offload != ALONE

    @property
    def verifies_all(self) -> bool:
        """Does the verifier see every token; where not, nothing is claimed of the text."""
        return self.offload == EVERYTHING


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("plain", "the verifier alone, one token a round", NOTHING, "exact"),
        System("cloud-mtp", "the server drafts with its own head, exact rule", NOTHING, "exact", draft_side="server"),
        System(
            "cloud-mtp-kept",
            "the server drafts with its own head over keep set and window, exact rule",
            NOTHING,
            "exact",
            draft_side="server",
            draft_scope="artifact",
        ),
        System("specedge", "several SLM passes on the device, exact rule", "specedge", "exact"),
        System("specedge-pd", "the same, drafting on while a reply is on its way", "specedge-pd", "exact"),
        System("specedge-eps", "several SLM passes on the device, epsilon rule", "specedge", "epsilon"),
        System("hyco-exact", "head and one SLM pass on the device, exact rule", "hybrid", "exact"),
        System("hyco", "head and one SLM pass on the device, epsilon rule", "hybrid", "epsilon"),
        System("hyco-head-only", "the head's chain alone on the device, exact rule", "head-chain", "exact"),
        System("hyco-eps-at-rejections", "as hyco, epsilon rule at rejections only", "hybrid", "epsilon-at-rejections"),
        System("hyco-typical", "as hyco, Medusa's typical acceptance", "hybrid", "typical"),
        System("hyco-2p", "head and two SLM passes on the device, epsilon rule", "hybrid-2p", "epsilon"),
        System(
            "hyco-server-head",
            "the server's head sends a chain with each reply, one SLM pass on the device, exact rule",
            "reply-chain",
            "exact",
            draft_side="reply",
            draft_scope="artifact",
        ),
        System("on-device", "the SLM alone, greedy, no server", "slm-alone", "exact", offload=ALONE),
        System("sled", "an SLM chain as long as it is sure, exact rule", "sled", "exact"),
        System(
            "synera", "confident SLM tokens stay unverified, the others exact", "synera", "exact", offload=CONFIDENT
        ),
    )
}


class Settings(msgspec.Struct, frozen=True):
    """What the systems of one run share: the recipe's drafting, whole, and the server's facts."""

    drafting: Drafting
    epsilon: float  # for systems with the epsilon rule
    server_steps: int  # K, for systems that draft on the server
    head_digest: str  # key of the head artifact, for systems whose device runs the head
    vocab_size: int
    stop_ids: frozenset[int]
    trace: bool = False  # ask for what each round was judged by
    rows_ms: tuple[tuple[float, float], ...] = ()  # of the server's passes (`wire.ServerInfo`), for budget "auto"


def find_system(name: str) -> System:
    """The system called `name`.

    Raises:
        HycoError: no such system; the hint lists the known ones.
    """
    if name not in SYSTEMS:
        known = ", ".join(f"{system.name} ({system.summary})" for system in SYSTEMS.values())
        raise HycoError(f"unknown system {name!r}", f"known ones: {known}")
    return SYSTEMS[name]


def find_baseline(name: str) -> System:
    """The system called `name`, for the others to be compared with.

    Raises:
        HycoError: no such system, or one that asks no server, so that it has no server time.
    """
    system = find_system(name)
    if not system.asks:
        raise HycoError(
            f"{name} asks no server, the others cannot be compared with it", "put another system first in the list"
        )
    return system


def make_drafter(system: System, settings: Settings, device: "Device | None") -> "Drafter":
    """The system's drafter; it may serve one generation after another. `device` may be None where none is needed."""
    if not system.needs_device:
        drafter: Drafter = null_drafter()
        return drafter
    if device is None:
        raise HycoError(f"system {system.name} drafts on the device, but none was opened", "choose a device back end")
    return DRAFTERS[system.drafter].make(device, settings)


def make_policy(system: System, settings: Settings) -> "OffloadPolicy":
    """What the system's device asks of the verifier."""
    return POLICIES[system.offload](settings)


def make_request(
    system: System, settings: Settings, prompt_id: str, sampling: wire.Sampling, seed: int, max_new_tokens: int
) -> Request:
    """What a generation under this system asks of the server."""
    return Request(
        system=system.name,
        prompt_id=prompt_id,
        sampling=sampling,
        acceptance=make_acceptance(system, settings),
        seed=seed,
        max_new_tokens=max_new_tokens,
        draft_side=system.draft_side,
        draft_steps=settings.server_steps if system.draft_side != "device" else 0,
        head_digest=settings.head_digest if system.needs_handoff else "",
        trace=settings.trace,
        stop_ids=tuple(sorted(settings.stop_ids)),
        draft_scope=system.draft_scope,
        vocab_size=settings.vocab_size,
    )


def make_acceptance(system: System, settings: Settings) -> wire.Acceptance:
    """The system's rule with those of the run's options that it reads."""
    values = {EPSILON: settings.epsilon, "stop_needs_draw": settings.drafting.stop_needs_draw}
    reads = RULES[system.rule].options
    return msgspec.structs.replace(
        wire.EXACT, rule=system.rule, **{name: value for name, value in values.items() if name in reads}
    )


class DrafterRow(NamedTuple):
    """How a drafter is made: by a function of its module, loaded when it is called. `runs_head`: it needs the hand-off
    of every reply."""

    make: Callable[["Device", Settings], "Drafter"]
    runs_head: bool = False


null_drafter = Deferred("hyco_export.device.drafters.drafter:NullDrafter")
HYBRID, HEAD_CHAIN, SPECEDGE, SLM_CHAIN = (
    f"hyco_export.device.drafters.{name}" for name in ("hybrid", "head_chain", "specedge", "slm_chain")
)
DRAFTERS: dict[str, DrafterRow] = {
    "hybrid": DrafterRow(Deferred(f"{HYBRID}:make_hybrid"), runs_head=True),
    "hybrid-2p": DrafterRow(partial(Deferred(f"{HYBRID}:make_hybrid"), passes=2), runs_head=True),
    "head-chain": DrafterRow(Deferred(f"{HEAD_CHAIN}:make_head_chain"), runs_head=True),
    "reply-chain": DrafterRow(Deferred(f"{HYBRID}:make_reply_chain")),
    "specedge": DrafterRow(Deferred(f"{SPECEDGE}:make_specedge")),
    "specedge-pd": DrafterRow(Deferred(f"{SPECEDGE}:make_proactive")),
    "slm-alone": DrafterRow(Deferred(f"{SLM_CHAIN}:make_alone")),
    "sled": DrafterRow(Deferred(f"{SLM_CHAIN}:make_sled")),
    "synera": DrafterRow(Deferred(f"{SLM_CHAIN}:make_synera")),
}

ask_for_all, keep_confident, ask_for_none = (
    Deferred(f"hyco_export.device.offload:{name}") for name in ("AskForAll", "KeepConfident", "AskForNone")
)
POLICIES: dict[str, Callable[[Settings], "OffloadPolicy"]] = {
    EVERYTHING: lambda settings: ask_for_all(),
    CONFIDENT: lambda settings: keep_confident(settings.drafting.synera),
    ALONE: lambda settings: ask_for_none(),
}
