"""Answers that tell of a change, held back until the change is on disk."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

HELD_SECONDS = 3.0
"""How long an answer waits for the disk before its asker is told that the state is unavailable: less than the timeout
that clients have unless they choose another."""


class HeldAnswer(NamedTuple):
    """One answer, and with which snapshot it may be told."""

    snapshot: int
    deadline: float
    asker: bytes
    request_id: int
    content: dict[str, Any]


class HeldAnswers:
    """In the order in which they were made, hence of their snapshots and deadlines."""

    def __init__(self) -> None:
        self._answers: deque[HeldAnswer] = deque()

    def __len__(self) -> int:
        return len(self._answers)

    def hold(self, snapshot: int, asker: bytes, request_id: int, content: dict[str, Any]) -> None:
        """Holds an answer until `snapshot` is on disk, at most `HELD_SECONDS`."""
        deadline = time.monotonic() + HELD_SECONDS
        self._answers.append(HeldAnswer(snapshot, deadline, asker, request_id, content))

    def next_deadline(self) -> float:
        """Seconds until the first one's time is up (infinity: none is held)."""
        return max(0.0, self._answers[0].deadline - time.monotonic()) if self._answers else float("inf")

    def take_durable(self, committed: int) -> Iterator[HeldAnswer]:
        """Removes and yields those that may be told."""
        while self._answers and self._answers[0].snapshot <= committed:
            yield self._answers.popleft()

    def take_overdue(self, all_of_them: bool = False) -> Iterator[HeldAnswer]:
        """Removes and yields those whose time is up."""
        while self._answers and (all_of_them or self._answers[0].deadline <= time.monotonic()):
            yield self._answers.popleft()
