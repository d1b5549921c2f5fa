"""What the engine tells other threads of its own: a report, made by its own thread between two turns.

The bus belongs to the engine's thread, so nobody else reads it. A report that does not come in time is itself the news:
the loop hangs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..kernels import RowState
from .tally import Tally


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run as it stands."""

    name: str
    actors: int
    batches_duplicate: int
    batches_early: int
    row: RowState


@dataclass(frozen=True, slots=True)
class Report:
    """The daemon as it stands."""

    uptime: float
    """Seconds."""
    device: str
    n_actions: int
    actors: int
    tally: Tally
    runs: list[RunReport]
    troubles: tuple[str, ...] = ()
    """Why new work should not come here now, a sentence each; empty: ready."""


class Reports:
    """Carries requests for a report to the engine's thread, and reports back.

    Args:
        make: makes one; called in the engine's thread only.
    """

    def __init__(self, make: Callable[[], Report]) -> None:
        self._make = make
        self._waiting: queue.SimpleQueue[tuple[threading.Event, list[Report]]] = queue.SimpleQueue()
        self._turned_at = time.monotonic()

    def answer(self) -> None:
        """In the engine's thread, once a turn: answers whoever waits, with one report for all."""
        self._turned_at = time.monotonic()
        report = None
        while not self._waiting.empty():
            arrived, place = self._waiting.get_nowait()
            report = report or self._make()
            place.append(report)
            arrived.set()

    def ask(self, seconds: float) -> Report | None:
        """In any other thread: a report, or None if the engine does not make one within `seconds`."""
        arrived: threading.Event = threading.Event()
        place: list[Report] = []
        self._waiting.put((arrived, place))
        return place[0] if arrived.wait(seconds) else None

    @property
    def silent_for(self) -> float:
        """Seconds since the engine's last turn."""
        return time.monotonic() - self._turned_at
