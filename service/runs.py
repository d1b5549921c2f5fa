"""Runs by name, each with its row of the bus and its learner sessions."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..config.settings import Settings, TunerSettings
from ..kernels import IsvBus, run_parameters
from ..wire.errors import LimitReached, UnknownRun
from .logs import log
from .sessions import Sessions


@dataclass(slots=True)
class Run:
    """One training job."""

    name: str
    row: int
    tuner: TunerSettings
    sessions: Sessions = field(default_factory=Sessions)
    actors: int = 0
    """Open streams."""
    batches_duplicate: int = 0
    batches_early: int = 0


class Runs:
    """All runs, in the order in which they were first named.

    Args:
        settings: where the number of rows and each run's tuner come from.
        bus: where a new run's row is opened.
    """

    def __init__(self, settings: Settings, bus: IsvBus) -> None:
        self._settings = settings
        self._bus = bus
        self._by_name: dict[str, Run] = {}

    @property
    def names(self) -> list[str]:
        """Names, oldest first."""
        return list(self._by_name)

    def __iter__(self):
        return iter(self._by_name.values())

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
        """The run of this name; a new one takes the next row.

        Raises:
            LimitReached: every row is taken.
        """
        run = self._by_name.get(name)
        if run is None:
            row = len(self._by_name)
            if row >= self._settings.bus.max_runs:
                raise LimitReached(
                    f"run: got {name!r}, a new one, and all {row} rows are taken by {', '.join(self.names)[:400]}; "
                    "raise bus.max_runs, or check the name for a typo"
                )
            self._bus.open_row(row, run_parameters(self._settings, name))
            log(logging.INFO, "run opened", run=name, row=row, rows=self._settings.bus.max_runs)
            run = self._by_name[name] = Run(name, row, self._settings.tuner_of(name))
        return run
