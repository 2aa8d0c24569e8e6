"""The head's chain alone, without runner-ups and SLM: what the device's head is worth by itself (HyCo, §4.6)."""

import math
import time
from collections.abc import Collection, Sequence

from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import plant


class HeadChainDrafter:
    """The chain of the device's head.

    Args:
        head: its ring follows the committed tokens.
        edge_log_prob: of a chain node; scores order nothing here and stand in the trace as in a hybrid tree.
        stop_ids: tokens after which nothing is drafted.
    """

    def __init__(self, head: HeadState, edge_log_prob: float, stop_ids: Collection[int]) -> None:
        self._head = head
        self._edge_log_prob = edge_log_prob
        self._stop_ids = frozenset(stop_ids)

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._head.begin(ids, given)

    def propose(self, ids: Sequence[int]) -> Draft:
        started = time.perf_counter()
        chain = self._head.draft().chain
        head_ms = (time.perf_counter() - started) * MS_PER_S
        return Draft(plant(chain, (), self._edge_log_prob, self._stop_ids), head_ms)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        self._head.observe(ids, given)


def make_head_chain(device: Device, settings: Settings) -> HeadChainDrafter:
    """With the device's own head."""
    edge_log_prob = math.log(settings.drafting.chain_acceptance)
    return HeadChainDrafter(HeadState(device.head, device.handoff), edge_log_prob, settings.stop_ids)
