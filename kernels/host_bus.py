"""`HostBus`: the bus in NumPy arrays. The semantic reference, and what runs where there is no GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..config.settings import Settings
from ..wire.slots import Counter, PoolColumn
from .action_counts import count_segments
from .action_entropy import observe_pools
from .bus import RowState
from .drain import Drain, Plan, Rejection, entropy_units, plan, reject
from .parameters import Parameter
from .sac_cotune import initialize_tuner, sac_cotune


class HostBus:
    """An `IsvBus` in host memory.

    Args:
        settings: n_actions, bus and observation are used.
    """

    def __init__(self, settings: Settings) -> None:
        runs, self._n_actions = settings.bus.max_runs, settings.n_actions
        self._pool_min_actions = settings.observation.pool_min_actions
        self._slots = np.zeros((runs, settings.bus.n_slots), dtype=np.float32)
        self._counters = np.zeros((runs, len(Counter)), dtype=np.int64)
        self._pools = np.zeros((runs, self._n_actions + len(PoolColumn)), dtype=np.int64)
        self._parameters = np.zeros((runs, len(Parameter)), dtype=np.float64)

    @property
    def device(self) -> str:
        """See `IsvBus`."""
        return f"cpu (NumPy {np.__version__})"

    def open_row(self, row: int, parameters: npt.NDArray[np.float64]) -> None:
        """See `IsvBus`."""
        for array in (self._slots, self._counters, self._pools):
            array[row] = 0
        self._parameters[row] = parameters
        initialize_tuner(self._slots[row], self._parameters[row])

    def restore(self, row: int, state: RowState) -> None:
        """See `IsvBus`."""
        self._slots[row], self._counters[row], self._pools[row] = state.slots, state.counters, state.pool

    def observe(self, drain: Drain) -> list[Rejection]:
        """See `IsvBus`."""
        rejected = reject(drain, self._n_actions)
        np.add.at(self._counters[:, Counter.BATCHES_REJECTED], drain.rows[[bad.batch for bad in rejected]], 1)
        cut = plan(drain, rejected, self._pools[:, self._n_actions + PoolColumn.ACTIONS], self._pool_min_actions)
        if not cut.batches.size:
            return rejected
        self._count_batches(drain, cut)
        pools = segment_pools(drain, cut, self._n_actions)
        starts = np.flatnonzero(cut.takes_pool).tolist()  # of each run
        for start, stop in zip(starts, [*starts[1:], cut.segment_row.size], strict=True):
            row = int(cut.segment_row[start])
            pools[start] += self._pools[row]
            full = stop if cut.complete[stop - 1] else stop - 1
            if full > start:
                blend = float(self._parameters[row, Parameter.EMA_BLEND])
                observe_pools(self._slots[row], self._counters[row], pools[start:full], blend)
            self._pools[row] = pools[full] if full < stop else 0
        return rejected

    def _count_batches(self, drain: Drain, cut: Plan) -> None:
        rows, lengths, prefill = drain.rows[cut.batches], drain.lengths[cut.batches], drain.prefill[cut.batches]
        for phase, batches, actions in (
            (~prefill, Counter.BATCHES_TRAIN, Counter.ACTIONS_TRAIN),
            (prefill, Counter.BATCHES_PREFILL, Counter.ACTIONS_PREFILL),
        ):
            np.add.at(self._counters[:, batches], rows[phase], 1)
            np.add.at(self._counters[:, actions], rows[phase], lengths[phase])

    def cotune(self, row: int, policy_entropy: float | None) -> RowState:
        """See `IsvBus`."""
        sac_cotune(self._slots[row], self._counters[row], self._parameters[row], policy_entropy)
        return self.row(row)

    def row(self, row: int) -> RowState:
        """See `IsvBus`."""
        return RowState(self._slots[row].copy(), self._counters[row].copy(), self._pools[row].copy())

    def write(self, row: int, slot: int, value: float) -> np.float32:
        """See `IsvBus`."""
        self._slots[row, slot] = value
        return self._slots[row, slot]

    @property
    def sharing(self) -> None:
        """See `IsvBus`."""
        return None

    def close(self) -> None:
        """See `IsvBus`; NumPy gives the memory back by itself."""


def segment_pools(drain: Drain, cut: Plan, n_actions: int) -> npt.NDArray[np.int64]:
    """Counts and columns of each segment, without what was pooled before: int64 [S, K + len(PoolColumn)]."""
    n_segments = cut.segment_row.size
    keep = np.zeros(drain.lengths.size, dtype=np.bool_)
    keep[cut.batches] = True
    lengths = drain.lengths[cut.batches]
    all_kept = cut.batches.size == drain.lengths.size
    actions = drain.actions if all_kept else drain.actions[np.repeat(keep, drain.lengths)]
    pools = np.zeros((n_segments, n_actions + len(PoolColumn)), dtype=np.int64)
    last = np.searchsorted(cut.segment_of_batch, np.arange(n_segments), side="right") - 1
    pools[:, :n_actions] = count_segments(actions, np.cumsum(lengths)[last], n_actions)
    columns = pools[:, n_actions:]
    np.add.at(columns[:, PoolColumn.ACTIONS], cut.segment_of_batch, lengths)
    if drain.proposed is not None and drain.has_proposed is not None:
        proposed = drain.proposed if all_kept else drain.proposed[np.repeat(keep, drain.lengths)]
        changed = np.cumsum(np.concatenate(([0], proposed != actions)))
        ends = np.cumsum(lengths)
        gated = changed[ends] - changed[ends - lengths]
        told = drain.has_proposed[cut.batches]
        np.add.at(columns[:, PoolColumn.PROPOSED], cut.segment_of_batch[told], lengths[told])
        np.add.at(columns[:, PoolColumn.GATED], cut.segment_of_batch[told], gated[told])
    if drain.row_entropy is not None:
        entropy = drain.row_entropy[cut.batches]
        told = ~np.isnan(entropy)
        np.add.at(columns[:, PoolColumn.ROWS], cut.segment_of_batch[told], lengths[told])
        np.add.at(columns[:, PoolColumn.ROW_ENTROPY], cut.segment_of_batch[told], entropy_units(entropy[told]))
    return pools
