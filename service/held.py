"""Acknowledgements that are held back until their batch is there, or their time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..wire.messages import Acknowledge

_Entry = tuple[bytes, int, Acknowledge]


class Held:
    """At most one held acknowledgement a stream: a newer one replaces it, since the actor has given up the older."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, _Entry]] = {}

    def hold(self, asker: bytes, request_id: int, request: Acknowledge) -> None:
        """Holds the request for its `wait_ms`."""
        deadline = time.monotonic() + request.wait_ms / 1000
        self._entries[request.stream] = (deadline, (asker, request_id, request))

    def next_deadline(self) -> float:
        """Seconds until the first one's time is up (infinity: none is held)."""
        if not self._entries:
            return float("inf")
        return max(0.0, min(deadline for deadline, _ in self._entries.values()) - time.monotonic())

    def take(self, ready: Callable[[Acknowledge], bool]) -> Iterator[_Entry]:
        """Removes and yields those that are ready or whose time is up."""
        now = time.monotonic()
        for number, (deadline, entry) in list(self._entries.items()):
            if now >= deadline or ready(entry[2]):
                del self._entries[number]
                yield entry
