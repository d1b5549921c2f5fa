"""Rows of the bus for watchers, as they change, at most one message a run and interval.

A message has two frames: the topic, which is the run's name and a zero byte (so that a subscription to ``a`` does not
get ``ab``), and a control map ``{v, run, slots: {name: value}, counters: {name: count}}``.
"""

from __future__ import annotations

import time

from ..kernels import IsvBus
from ..wire.codec import encode_control
from ..wire.slots import Counter, Slot
from .runs import Run
from .sockets import Sockets


class Publisher:
    """Publishes rows that changed.

    Args:
        sockets: where PUB is.
        bus: where the rows are.
        interval: least seconds between two messages of one run.
    """

    def __init__(self, sockets: Sockets, bus: IsvBus, interval: float) -> None:
        self._sockets = sockets
        self._bus = bus
        self._interval = interval
        self._changed: dict[str, Run] = {}
        self._published: dict[str, float] = {}

    def changed(self, run: Run) -> None:
        """Notes that the run's row changed."""
        self._changed[run.name] = run

    def publish_due(self) -> float:
        """Publishes what is due; seconds until the next is (infinity: nothing waits)."""
        now, next_in = time.monotonic(), float("inf")
        for name, run in list(self._changed.items()):
            due_in = self._published.get(name, -self._interval) + self._interval - now
            if due_in > 0:
                next_in = min(next_in, due_in)
                continue
            del self._changed[name]
            self._published[name] = now
            self._publish(run)
        return next_in

    def _publish(self, run: Run) -> None:
        state = self._bus.row(run.row)
        message = {
            "run": run.name,
            "slots": {slot.name: float(state.slots[slot]) for slot in Slot},
            "counters": {counter.name: int(state.counters[counter]) for counter in Counter},
        }
        self._sockets.publish(run.name.encode() + b"\0", encode_control(message))
