"""`Durability`: decides when a snapshot is taken, and says what is on disk. *What has been told is durable.*

At most one snapshot is with the writer. The next is taken at once when somebody waits for it, so all who wait
meanwhile share it, and otherwise `interval` after the first change. It holds the rows, sessions and stream numbers of
all runs that changed, read between two turns of the engine: they agree with each other.
"""

from __future__ import annotations

import os
import select
import time

import numpy as np

from ..config.settings import Settings
from ..kernels import IsvBus
from ..wire.errors import StateNotKept, StateUnavailable
from .changes import Changes
from .runs import Run
from .snapshot import HistoryLine, RunRecord, Snapshot, history_line
from .streams import Stream
from .writer import Writer

BUSY_SHARE = 0.1
"""Most of the engine's time that snapshots may take while batches flow."""


class Durability:
    """See the module. Without a writer nothing is kept, and everything counts as durable at once.

    Args:
        settings: n_actions, and the interval.
        bus: whose rows are read.
        changes: what changed; a snapshot takes it.
        writer: has the state file; None: no state is kept.
    """

    def __init__(self, settings: Settings, bus: IsvBus, changes: Changes, writer: Writer | None) -> None:
        self._interval = settings.state.interval
        self._n_actions = settings.n_actions
        self._bus = bus
        self._changes = changes
        self._writer = writer
        self._in_flight = 0  # number of the snapshot that is with the writer; 0: none
        self._marks: list[tuple[Stream, int]] = []  # how far it takes each stream
        self._lines: dict[str, tuple[int | None, ...]] = {}  # what each run's last line of history told
        self._hurried = False
        self._not_before = 0.0
        self.committed = 0
        """Number of the last snapshot that is on disk."""

    @property
    def failure(self) -> str | None:
        """Why the disk does not take the state at present; None: it does, or none is kept."""
        return None if self._writer is None else self._writer.failure

    @property
    def state(self) -> str:
        """In a word: "kept", "failing" or "off"."""
        return "off" if self._writer is None else "failing" if self._writer.failure is not None else "kept"

    def check(self, taken: bool = False) -> None:
        """Raises StateUnavailable while the disk fails: for changes that are promised to be durable. `taken`: this one
        was made before, and waits for the disk."""
        if self.failure is not None:
            assert self._writer is not None
            effect = "the step was taken, and asking again gives its answer then" if taken else "nothing was changed"
            raise StateUnavailable(
                f"the daemon cannot write its state to {self._writer.path} ({self.failure}) and tries until it can; "
                f"{effect}. See to its disk"
            )

    def holds(self, snapshot: int) -> bool:
        """Whether what snapshot `snapshot` tells may be told."""
        return self._writer is None or snapshot <= self.committed

    def hurry(self) -> None:
        """Somebody waits for what is applied to become durable."""
        self._hurried = True

    def due_in(self) -> float:
        """Seconds until a snapshot is due (infinity: none is, or the writer is at work and will wake us)."""
        if self._writer is None or self._in_flight or self._changes.since is None:
            return float("inf")
        return 0.0 if self._hurried else max(0.0, self._changes.since + self._interval - time.monotonic())

    def collect(self) -> None:
        """Takes note of a snapshot that was committed."""
        if self._writer is None or not self._in_flight or self._writer.committed() < self._in_flight:
            return
        self.committed, self._in_flight = self._in_flight, 0
        for stream, last in self._marks:
            stream.durable = last
        self._marks.clear()
        self._hurried = False  # whoever still waits says so again

    def begin(self, busy: bool) -> None:
        """Takes a snapshot if one is due. `busy`: batches flow, so those who wait share a little longer."""
        if self._changes.since is None:
            return
        if self._writer is None:
            self._changes.clear()
            return
        if self._in_flight:
            return
        now = time.monotonic()
        if (now >= self._not_before or not busy) if self._hurried else now >= self._changes.since + self._interval:
            self._take(self._writer)
            self._not_before = now + (time.monotonic() - now) / BUSY_SHARE

    def _take(self, writer: Writer) -> None:
        changes, written = self._changes, time.time_ns()
        runs: list[RunRecord] = []
        history: list[HistoryLine] = []
        for run in changes.runs.values():
            record = self._record(run, written)
            runs.append(record)
            line = history_line(record, run.sessions.last_step)
            told = (line.step, line.observations, line.updates)
            if self._lines.get(run.name, (None, 0, 0)) != told:
                self._lines[run.name] = told
                history.append(line)
        opened = changes.opened
        rejections = [(n, list(s.rejections)) for n, s in changes.rejections.items() if n not in opened]
        snapshot = Snapshot(
            changes.number, runs, [s.record() for s in opened.values()], changes.closed, rejections, history
        )
        self._in_flight, self._hurried = snapshot.number, False
        changes.taken()
        writer.submit(snapshot)

    def _record(self, run: Run, written: int) -> RunRecord:
        streams = np.empty((2, len(run.streams)), dtype=np.int64)
        streams[0], streams[1] = list(run.streams), [stream.last for stream in run.streams.values()]
        self._marks += [(stream, stream.last) for stream in run.streams.values() if stream.last != stream.durable]
        return RunRecord(
            name=run.name,
            row=run.row,
            state=self._bus.row(run.row),
            source=run.tuner.source,
            target=run.tuner.target(self._n_actions),
            batches_duplicate=run.batches_duplicate,
            batches_early=run.batches_early,
            streams=streams,
            sessions=run.sessions.encode(),
            written=written,
        )

    def finish(self, seconds: float) -> None:
        """Returns when everything is on disk.

        Raises:
            StateNotKept: it was not within `seconds`.
        """
        if self._writer is None:
            return
        poller = select.poll()  # select.select cannot watch descriptors above 1023
        poller.register(self._writer.wake, select.POLLIN)
        deadline = time.monotonic() + seconds
        while True:
            self.collect()
            if not self._in_flight:
                if self._changes.since is None:
                    return
                self._take(self._writer)
            left = deadline - time.monotonic()
            if left <= 0:
                raise StateNotKept(
                    f"the last state was not written to {self._writer.path} within {seconds:g} s "
                    f"({self.failure or 'the disk does not answer'}); what was told to clients was durable before, and "
                    "actors that are still there send the rest again"
                )
            if poller.poll(left * 1000):
                os.eventfd_read(self._writer.wake)
