"""The ISV bus as the daemon uses it: one contract, two devices."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..config.settings import Settings
from ..wire.errors import DeviceUnavailable
from ..wire.slots import Counter, Slot
from .drain import Drain, Rejection

if TYPE_CHECKING:
    from .cuda_sharing import DeviceSharing

logger = logging.getLogger("cotuned")


@dataclass(frozen=True, slots=True)
class RowState:
    """A copy of what the bus holds for one run."""

    slots: npt.NDArray[np.float32]
    """[n_slots]"""
    counters: npt.NDArray[np.int64]
    """[len(Counter)]"""
    pool: npt.NDArray[np.int64]
    """[K + len(PoolColumn)]: counts of the pooled actions, then the columns."""

    def if_seen(self, slot: Slot, counter: Counter) -> float | None:
        """The value of a slot; None as long as `counter` says that nothing was ever written there."""
        return float(self.slots[slot]) if self.counters[counter] else None


class IsvBus(Protocol):
    """float32 slots ``[max_runs, n_slots]``, int64 counters and pools, and the two kernels that work on them.

    Calls take effect in the order in which they are made, and when one returns a later `row` shows its effect. One
    thread uses a bus at a time.
    """

    @property
    def device(self) -> str:
        """What the bus lives on, in words, e.g. "cpu (NumPy 2.4.6)"."""
        ...

    def open_row(self, row: int, parameters: npt.NDArray[np.float64]) -> None:
        """Makes row `row` a new run's: zeros, then α, τ and the target from `parameters` (`run_parameters`)."""
        ...

    def restore(self, row: int, state: RowState) -> None:
        """Gives an open row what `row` once returned, bit for bit; its parameters stay those of `open_row`."""
        ...

    def observe(self, drain: Drain) -> list[Rejection]:
        """Counts the batches of a drain into pools and makes an observation of every pool that gets full.

        Returns:
            The batches that were rejected; beyond ``BATCHES_REJECTED`` they changed nothing.
        """
        ...

    def cotune(self, row: int, policy_entropy: float | None) -> RowState:
        """One new learner step (`sac_cotune`); the row as it stands after it."""
        ...

    def row(self, row: int) -> RowState:
        """A copy of one row; changes nothing."""
        ...

    def write(self, row: int, slot: int, value: float) -> np.float32:
        """Writes one slot and returns what float32 made of the value. The caller checks that the slot is the user's."""
        ...

    @property
    def sharing(self) -> DeviceSharing | None:
        """What other processes on the same GPU may see of it and it of theirs; None: it lives in host memory."""
        ...

    def close(self) -> None:
        """Gives the memory back. The bus must not be used afterwards."""
        ...


def open_bus(settings: Settings) -> IsvBus:
    """The bus on the device that the settings ask for; ``auto`` takes the GPU if there is one that works.

    Raises:
        DeviceUnavailable: ``cuda`` was asked for and cannot be used; the message says why.
    """
    from .host_bus import HostBus

    if settings.device == "cpu":
        return HostBus(settings)
    try:
        from .cuda_bus import CudaBus

        return CudaBus(settings)
    except DeviceUnavailable as error:
        if settings.device == "cuda":
            raise
        logger.info("no GPU is used", extra={"fields": {"why": str(error)}})
        return HostBus(settings)
