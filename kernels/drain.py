"""A drain: the batches that one pass over the bus takes in, which of them count, and where observations end.

Both buses share this: it decides from numbers that the host knows anyway (lengths, pool sizes, index ranges), so the
device gets a finished plan and sends nothing back that a decision waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..wire.slots import ROW_ENTROPY_UNIT

Int64Array = npt.NDArray[np.int64]
ActionArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Drain:
    """B batches with N actions in all. Batches of one run stand together, in the order in which they arrived."""

    actions: ActionArray
    """[N] executed action indices, batch after batch; any integer dtype."""
    lengths: Int64Array
    """[B] actions of each batch; they sum to N."""
    rows: Int64Array
    """[B] bus row of each batch's run; equal values stand together."""
    prefill: npt.NDArray[np.bool_]
    """[B] whether the batch is of the prefill phase."""
    proposed: ActionArray | None = None
    """[N] proposed action indices; anything within [0, K) where `has_proposed` is False. None: no batch has any."""
    has_proposed: npt.NDArray[np.bool_] | None = None
    """[B] whether the batch reported proposed actions."""
    row_entropy: npt.NDArray[np.float64] | None = None
    """[B] sum of the entropies of the batch's post-gate rows, nats; NaN where not reported. None: no batch did."""

    @classmethod
    def of(cls, row: int, batches: Sequence[ActionArray], *, prefill: bool = False) -> Drain:
        """Batches of one run that report executed actions only."""
        return cls(
            np.concatenate(batches),
            np.array([batch.size for batch in batches], dtype=np.int64),
            np.full(len(batches), row, dtype=np.int64),
            np.full(len(batches), prefill),
        )


class Rejection(NamedTuple):
    """Why one batch of a drain does not count."""

    batch: int
    """Place in the drain."""
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches that count, cut into S segments: each becomes one observation, or the run's new pool."""

    batches: Int64Array
    """[A] places in the drain of the batches that count (valid and not empty)."""
    segment_of_batch: Int64Array
    """[A] segment of each; it never falls."""
    segment_row: Int64Array
    """[S] bus row."""
    takes_pool: npt.NDArray[np.bool_]
    """[S] whether it is its run's first, which the actions pooled before belong to."""
    complete: npt.NDArray[np.bool_]
    """[S] whether it is an observation; if not, it becomes the pool."""


def reject(drain: Drain, n_actions: int) -> list[Rejection]:
    """The batches that must not count, in order, with code and sentence.

    "action_out_of_range": an executed or proposed index outside [0, K); "row_entropy_out_of_range": a reported row
    entropy that n rows over K actions cannot have.
    """
    rejections = {bad.batch: bad for bad in _bad_entropies(drain, n_actions)}
    for what, indices, counts in (("executed", drain.actions, None), ("proposed", drain.proposed, drain.has_proposed)):
        if indices is not None and indices.size:
            rejections |= {bad.batch: bad for bad in _bad_indices(what, indices, counts, drain.lengths, n_actions)}
    return [rejections[batch] for batch in sorted(rejections)]


def _bad_indices(
    what: str, indices: ActionArray, counts: npt.NDArray[np.bool_] | None, lengths: Int64Array, n_actions: int
) -> list[Rejection]:
    if int(indices.max()) < n_actions and (indices.dtype.kind == "u" or int(indices.min()) >= 0):
        return []
    bad = np.flatnonzero((indices >= n_actions) | (indices < 0))
    ends = np.cumsum(lengths)
    batch_of_bad = np.searchsorted(ends, bad, side="right")
    batches, first = np.unique(batch_of_bad, return_index=True)
    return [
        Rejection(
            int(batch),
            "action_out_of_range",
            f"{what}[{int(bad[at] - (ends[batch] - lengths[batch]))}]: got {int(indices[bad[at]])}, expected an action "
            f"index from 0 to {n_actions - 1} (K = {n_actions}); nothing of this batch was counted",
        )
        for batch, at in zip(batches, first, strict=True)
        if counts is None or counts[batch]
    ]


def _bad_entropies(drain: Drain, n_actions: int) -> list[Rejection]:
    if drain.row_entropy is None:
        return []
    highest = drain.lengths * math.log(n_actions) * (1 + 1e-6)
    value = drain.row_entropy
    bad = (value < 0) | (value > highest)  # NaN: not reported
    return [
        Rejection(
            int(batch),
            "row_entropy_out_of_range",
            f"row_entropy: got {value[batch]:g} nats for {drain.lengths[batch]} rows, expected 0 to "
            f"{highest[batch]:g} = n·ln {n_actions}; nothing of this batch was counted",
        )
        for batch in np.flatnonzero(bad)
    ]


def plan(drain: Drain, rejected: Sequence[Rejection], pool_actions: Int64Array, pool_min_actions: int) -> Plan:
    """Cuts the batches that count into segments.

    A segment ends with the batch that brings its actions, those pooled before included, to `pool_min_actions`; batches
    are never split.

    Args:
        drain: the batches.
        rejected: those that do not count.
        pool_actions: [max_runs] actions in each run's pool before this drain.
        pool_min_actions: least actions of an observation.
    """
    counted = drain.lengths > 0
    counted[[rejection.batch for rejection in rejected]] = False
    batches = np.flatnonzero(counted)
    lengths, rows = drain.lengths[batches], drain.rows[batches]
    segment_of_batch = np.empty(batches.size, dtype=np.int64)
    segment_row: list[Int64Array] = []
    takes_pool: list[npt.NDArray[np.bool_]] = []
    complete: list[npt.NDArray[np.bool_]] = []
    run_starts = np.flatnonzero(np.diff(rows, prepend=-1))
    run_stops = np.append(run_starts[1:], batches.size)[: run_starts.size]  # none where no batch counts
    n_segments = 0
    for start, stop in zip(run_starts.tolist(), run_stops.tolist(), strict=True):
        row = int(rows[start])
        last = _last_batches(lengths[start:stop], pool_min_actions, int(pool_actions[row]))
        full = int(last.size)
        # Batches behind the last complete segment are one more, which becomes the pool.
        n = full + (full == 0 or int(last[-1]) < stop - start - 1)
        segment_of_batch[start:stop] = n_segments + np.searchsorted(last, np.arange(stop - start))
        segment_row.append(np.full(n, row, dtype=np.int64))
        takes_pool.append(np.arange(n) == 0)
        complete.append(np.arange(n) < full)
        n_segments += n
    none = np.empty(0, dtype=np.int64)
    return Plan(
        batches,
        segment_of_batch,
        np.concatenate([none, *segment_row]),
        np.concatenate([none.astype(np.bool_), *takes_pool]),
        np.concatenate([none.astype(np.bool_), *complete]),
    )


def _last_batches(lengths: Int64Array, pool_min_actions: int, pooled: int) -> Int64Array:
    """Places of the batches that complete a segment, for the batches of one run and what was pooled before."""
    size = int(lengths[0])
    if (lengths >= pool_min_actions).all():  # each is an observation
        return np.arange(lengths.size)
    if (lengths == size).all():  # the same number of batches each time, but for the first
        first = max(-(-(pool_min_actions - pooled) // size), 1) - 1
        return np.arange(first, lengths.size, -(-pool_min_actions // size))
    ends = np.cumsum(lengths)
    places: list[int] = []
    before = -pooled
    while (place := int(np.searchsorted(ends, before + pool_min_actions))) < lengths.size:
        places.append(place)
        before = int(ends[place])
    return np.array(places, dtype=np.int64)


def entropy_units(row_entropy: npt.NDArray[np.float64]) -> Int64Array:
    """Nats to whole `ROW_ENTROPY_UNIT`s, which add up to the same bits in any order."""
    return np.rint(row_entropy / ROW_ENTROPY_UNIT).astype(np.int64)
