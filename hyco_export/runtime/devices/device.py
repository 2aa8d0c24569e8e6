"""A device: the head and the SLM opened on one back end, with what drafters need to know of them."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from hyco_export.core.handoff import HandoffSpec
from hyco_export.runtime.ports import HeadDevice, SlmDevice


@dataclass(frozen=True)
class Device:
    """Both drafting models. `slm_ids` [C] are the verifier ids of the SLM's columns; `close` releases the graphs."""

    head: HeadDevice
    slm: SlmDevice
    handoff: HandoffSpec
    slm_ids: np.ndarray

    def close(self) -> None:
        """Release the graphs; a back end may hold processes."""
        self.head.close()
        self.slm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
