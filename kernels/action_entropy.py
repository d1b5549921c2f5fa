"""Entropy of executed actions: the NumPy reference. The CUDA kernels stand in ``action_entropy.cu``.

H = −Σ p ln p with p = count / n (Shannon 1948; the "plug-in" estimate), in nats, computed in float64; empty bins
contribute 0. The EMA in a float32 slot starts with the first observation instead of zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..wire.slots import ROW_ENTROPY_UNIT, Counter, PoolColumn, Slot

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


def entropy_of_counts(counts: Int64Array) -> npt.NDArray[np.float64]:
    """Plug-in entropy of each histogram.

    Args:
        counts: int64 [..., K], not negative.

    Returns:
        float64 [...], nats, in [0, ln K]; exactly 0.0 for a histogram with one bin in use, or none.
    """
    totals = counts.sum(axis=-1, keepdims=True, dtype=np.float64)
    p = counts / np.maximum(totals, 1.0)
    logs = np.log(p, out=np.zeros_like(p), where=counts > 0)
    return np.asarray(0.0 - (p * logs).sum(axis=-1))


def blend_first(slot: np.float32, value: float, blend: float) -> np.float32:
    """The rule of slots 420 and 583, where 0.0 means unset: the first value other than 0 is taken whole."""
    if slot == 0:
        return np.float32(value)
    return np.float32((1.0 - blend) * float(slot) + blend * value)


def blend_counted(slot: np.float32, value: float, blend: float, observations: int) -> np.float32:
    """The rule of the slots in which 0.0 is a value like any other: the first of `observations` is taken whole."""
    if observations == 0:
        return np.float32(value)
    return np.float32((1.0 - blend) * float(slot) + blend * value)


def observe_pool(slots: Float32Array, counters: Int64Array, pool: Int64Array, blend: float) -> None:
    """Makes one observation of a full pool.

    Args:
        slots: float32 [n_slots], the run's bus row; changed in place.
        counters: int64 [len(Counter)] of the run; changed in place.
        pool: int64 [K + len(PoolColumn)]: K counts, then the columns. Not changed.
        blend: weight of the new observation.
    """
    columns = pool[pool.size - len(PoolColumn) :]
    h = float(entropy_of_counts(pool[: pool.size - len(PoolColumn)]))
    slots[Slot.ACTION_ENTROPY] = h
    slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX] = blend_first(slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX], h, blend)
    counters[Counter.OBSERVATIONS] += 1
    proposed, rows = int(columns[PoolColumn.PROPOSED]), int(columns[PoolColumn.ROWS])
    if proposed:
        rate = int(columns[PoolColumn.GATED]) / proposed
        _observe(slots, counters, Slot.GATE_RATE, Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS, rate, blend)
    if rows:
        mean = int(columns[PoolColumn.ROW_ENTROPY]) * ROW_ENTROPY_UNIT / rows
        _observe(
            slots,
            counters,
            Slot.CONDITIONAL_ENTROPY,
            Slot.CONDITIONAL_ENTROPY_EMA,
            Counter.CONDITIONAL_OBSERVATIONS,
            mean,
            blend,
        )


def _observe(
    slots: npt.NDArray[Any], counters: Int64Array, last: Slot, ema: Slot, counter: Counter, value: float, blend: float
) -> None:
    slots[last] = value
    slots[ema] = blend_counted(slots[ema], value, blend, int(counters[counter]))
    counters[counter] += 1
