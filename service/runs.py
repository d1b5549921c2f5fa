"""Runs by name, each with its row of the bus and its learner sessions."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config.settings import Settings, TunerSettings
from ..kernels import IsvBus, run_parameters
from ..wire.errors import LimitReached, UnknownRun
from ..wire.slots import Counter
from .changes import Changes
from .logs import log
from .sessions import Sessions
from .snapshot import RunRecord

if TYPE_CHECKING:
    from .streams import Stream


@dataclass(slots=True)
class Run:
    """One training job."""

    name: str
    row: int
    tuner: TunerSettings
    sessions: Sessions = field(default_factory=Sessions)
    streams: dict[int, Stream] = field(default_factory=dict[int, "Stream"])
    """The open ones by number."""
    answered_in: int = 0
    """Number of the snapshot that holds the answer to the last new step."""
    batches_duplicate: int = 0
    batches_early: int = 0


class Runs:
    """All runs, in the order in which they were first named.

    Args:
        settings: where the number of rows and each run's tuner come from.
        bus: where a new run's row is opened.
        changes: is told of new runs.
    """

    def __init__(self, settings: Settings, bus: IsvBus, changes: Changes) -> None:
        self._settings = settings
        self._bus = bus
        self._changes = changes
        self._by_name: dict[str, Run] = {}

    @property
    def names(self) -> list[str]:
        """Names, oldest first."""
        return list(self._by_name)

    def __iter__(self):
        return iter(self._by_name.values())

    def get(self, name: str) -> Run | None:
        """The run of this name, or None."""
        return self._by_name.get(name)

    def find(self, name: str) -> Run:
        """The run of this name.

        Raises:
            UnknownRun: there is none.
        """
        run = self._by_name.get(name)
        if run is None:
            known = ", ".join(self.names) or "none yet"
            raise UnknownRun(f"run: got {name!r}, which no actor and no cotune has named yet; known are {known}")
        return run

    def find_or_open(self, name: str) -> Run:
        """The run of this name; a new one takes the first free row.

        Raises:
            LimitReached: every row is taken.
        """
        run = self._by_name.get(name)
        if run is None:
            row = self._free_row()
            if row is None:
                raise LimitReached(
                    f"run: got {name!r}, a new one, and all {len(self._by_name)} rows are taken by "
                    f"{', '.join(self.names)[:400]}; raise bus.max_runs, or check the name for a typo"
                )
            self._bus.open_row(row, run_parameters(self._settings, name))
            log(logging.INFO, "run opened", run=name, row=row, rows=self._settings.bus.max_runs)
            run = self._by_name[name] = Run(name, row, self._settings.tuner_of(name))
            self._changes.changed(run)
        return run

    def _free_row(self) -> int | None:
        taken = {run.row for run in self._by_name.values()}
        return next((row for row in range(self._settings.bus.max_runs) if row not in taken), None)

    def restore(self, record: RunRecord) -> Run:
        """A run as it was written, in its old row unless that is taken or gone; tuned as the settings say now.

        The caller has checked that there are rows enough.
        """
        row = record.row
        if row >= self._settings.bus.max_runs or any(run.row == row for run in self._by_name.values()):
            free = self._free_row()
            assert free is not None
            row = free
        tuner = self._settings.tuner_of(record.name)
        target, state = tuner.target(self._settings.n_actions), record.state
        if (tuner.source, target) != (record.source, record.target):
            now, then = {"source": tuner.source, "target": target}, {"source": record.source, "target": record.target}
            log(logging.WARNING, "tuner changed", run=record.name, now=now, before=then)
        if tuner.source != record.source:
            # The last update saw another counter; compared with this source's it would mean nothing.
            counters = state.counters.copy()
            counters[Counter.SOURCE_SEEN] = 0
            state = replace(state, counters=counters)
        self._bus.open_row(row, run_parameters(self._settings, record.name))
        self._bus.restore(row, state)
        run = Run(record.name, row, tuner, Sessions.decode(record.sessions))
        run.batches_duplicate, run.batches_early = record.batches_duplicate, record.batches_early
        self._by_name[record.name] = run
        if row != record.row:
            self._changes.changed(run)
        return run
