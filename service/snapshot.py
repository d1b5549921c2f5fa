"""What goes to disk in one transaction, and what comes back from it at the next start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels import RowState
from ..wire.slots import Counter, Slot, TunerStatus

Rejections = list[tuple[int, str, str]]
"""Number, code and sentence of rejected batches that their actor has not seen yet."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, with the numbers of the last batches that its counters hold: taken at one moment, so they agree."""

    name: str
    row: int
    state: RowState
    source: str
    target: float
    """What the settings said when it was written; the settings of the next start decide anew."""
    batches_duplicate: int
    batches_early: int
    streams: npt.NDArray[np.int64]
    """[2, n]: numbers of the open streams, and the last batch taken from each."""
    sessions: bytes
    """`Sessions.encode`."""
    written: int
    """When; nanoseconds since 1970."""


class StreamRecord(NamedTuple):
    """What is known of a stream since it was opened."""

    number: int
    run: str
    actor: str
    rejections: Rejections
    owner: str | None = None
    """Public key that opened it; None without CURVE."""


class HistoryLine(NamedTuple):
    """What a commit changed in one run, for people; names and order are the columns of the table."""

    time: int
    """Nanoseconds since 1970."""
    run: str
    step: int | None
    """The learner's; None: no learner has asked."""
    observations: int
    updates: int
    entropy: float
    """Slot 583; nats."""
    last_entropy: float
    """The last observation behind it."""
    policy_entropy: float | None
    conditional_entropy: float | None
    gate_rate: float | None
    alpha: float
    tau: float
    error: float | None
    """Target − source at the last update; nats."""
    status: str
    """A `TunerStatus`, in lower case."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that changed since the one before. `number` counts them from 1 in each life of the daemon."""

    number: int
    runs: list[RunRecord]
    opened: list[StreamRecord]
    closed: list[int]
    rejections: list[tuple[int, Rejections]]
    """New lists of streams that were opened before."""
    history: list[HistoryLine]


@dataclass(frozen=True, slots=True)
class Stored:
    """All that a state file holds, but the history."""

    runs: list[RunRecord]
    streams: list[StreamRecord]


def history_line(record: RunRecord, step: int | None) -> HistoryLine:
    """The line of history that a run's record gives."""
    slots, counters = record.state.slots, record.state.counters
    return HistoryLine(
        time=record.written,
        run=record.name,
        step=step,
        observations=int(counters[Counter.OBSERVATIONS]),
        updates=int(counters[Counter.UPDATES]),
        entropy=float(slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX]),
        last_entropy=float(slots[Slot.ACTION_ENTROPY]),
        policy_entropy=record.state.if_seen(Slot.RL_POLICY_ENTROPY_EMA_INDEX, Counter.POLICY_OBSERVATIONS),
        conditional_entropy=record.state.if_seen(Slot.CONDITIONAL_ENTROPY_EMA, Counter.CONDITIONAL_OBSERVATIONS),
        gate_rate=record.state.if_seen(Slot.GATE_RATE_EMA, Counter.GATE_OBSERVATIONS),
        alpha=float(slots[Slot.ALPHA]),
        tau=float(slots[Slot.TAU]),
        error=record.state.if_seen(Slot.ENTROPY_ERROR, Counter.UPDATES),
        status=TunerStatus(int(slots[Slot.TUNER_STATUS])).name.lower(),
    )
