"""Entropy of executed actions: the NumPy reference. The CUDA kernels stand in ``action_entropy.cu``.

H = −Σ p ln p with p = count / n (Shannon 1948; the "plug-in" estimate), in nats, computed in float64; empty bins
contribute 0. The EMA in a float32 slot starts with the first observation instead of zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

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
    logs = np.log(np.where(counts > 0, p, 1.0))
    return np.asarray(0.0 - (p * logs).sum(axis=-1))


def blend_first(slot: np.float32, value: float, blend: float) -> np.float32:
    """The rule of slots 420 and 583, where 0.0 means unset: the first value other than 0 is taken whole."""
    return np.float32(_blend(float(slot), [value], blend, lambda slot, _: slot == 0))


def observe_pools(slots: Float32Array, counters: Int64Array, pools: Int64Array, blend: float) -> None:
    """Makes one observation of each full pool, in their order.

    Args:
        slots: float32 [n_slots], the run's bus row; changed in place.
        counters: int64 [len(Counter)] of the run; changed in place.
        pools: int64 [S, K + len(PoolColumn)]: of each, K counts, then the columns. S ≥ 1. Not changed.
        blend: weight of the new observation.
    """
    counts, columns = pools[:, : -len(PoolColumn)], pools[:, -len(PoolColumn) :]
    entropies: list[float] = entropy_of_counts(counts).tolist()
    slots[Slot.ACTION_ENTROPY] = entropies[-1]
    ema = Slot.RL_ACTION_ENTROPY_EMA_INDEX
    slots[ema] = _blend(float(slots[ema]), entropies, blend, lambda slot, _: slot == 0)
    counters[Counter.OBSERVATIONS] += len(entropies)
    proposed, rows = columns[:, PoolColumn.PROPOSED], columns[:, PoolColumn.ROWS]
    rates = columns[proposed > 0, PoolColumn.GATED] / proposed[proposed > 0]
    _observe(slots, counters, Slot.GATE_RATE, Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS, rates, blend)
    means = columns[rows > 0, PoolColumn.ROW_ENTROPY] * ROW_ENTROPY_UNIT / rows[rows > 0]
    _observe(
        slots,
        counters,
        Slot.CONDITIONAL_ENTROPY,
        Slot.CONDITIONAL_ENTROPY_EMA,
        Counter.CONDITIONAL_OBSERVATIONS,
        means,
        blend,
    )


def _observe(
    slots: Float32Array,
    counters: Int64Array,
    last: Slot,
    ema: Slot,
    counter: Counter,
    values: npt.NDArray[np.float64],
    blend: float,
) -> None:
    """For slots in which 0.0 is a value like any other: the first observation of all is taken whole."""
    if not values.size:
        return
    seen = int(counters[counter])
    slots[last] = values[-1]
    slots[ema] = _blend(float(slots[ema]), values.tolist(), blend, lambda _, place: seen + place == 0)
    counters[counter] += values.size


def _blend(slot: float, values: list[float], blend: float, unset: Callable[[float, int], bool]) -> float:
    """The EMA of the slot after these values, each step rounded to float32 as the slot holds it."""
    cell = array("f", [slot])  # the cheapest way to round one number to float32
    for place, value in enumerate(values):
        cell[0] = value if unset(slot, place) else (1.0 - blend) * slot + blend * value
        slot = cell[0]
    return slot
