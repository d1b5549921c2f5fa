"""Learner sessions of one run: who owns tuning, and which step was answered with what."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Any

import msgpack as _untyped_msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..wire.answers import CotuneAnswer, answer_from_map

msgpack: Any = _untyped_msgpack

_REMEMBERED = 1024
"""Older sessions that are recognised when they ask again; the oldest is forgotten first."""


class Turn(Enum):
    """What a `cotune` request is."""

    NEW_STEP = "a step that was not answered yet"
    REPEATED = "a step that was answered, or an older one"
    NOT_OWNER = "a session that a newer one has replaced"


class Sessions:
    """The newest session owns tuning; steps are counted within it."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._last_step = -1
        self._stored: CotuneAnswer | None = None
        self._replaced: dict[int, None] = {}  # a dict keeps the order of insertion; a set would not
        self._encoded: bytes | None = None

    @property
    def stored(self) -> CotuneAnswer | None:
        """The answer to the owner's last new step."""
        return self._stored

    @property
    def last_step(self) -> int | None:
        """The owner's last new step."""
        return None if self._stored is None else self._last_step

    def turn(self, session: int, step: int) -> Turn:
        """Says what the request is; changes nothing."""
        if session in self._replaced:
            return Turn.NOT_OWNER
        return Turn.REPEATED if session == self._owner and step <= self._last_step else Turn.NEW_STEP

    def answered(self, session: int, step: int, answer: CotuneAnswer) -> None:
        """Stores the answer to a new step; a session not seen before becomes the owner."""
        if session != self._owner:
            if self._owner is not None:
                self._replaced[self._owner] = None
                if len(self._replaced) > _REMEMBERED:
                    del self._replaced[next(iter(self._replaced))]
            self._owner = session
        self._last_step, self._stored, self._encoded = step, answer, None

    def encode(self) -> bytes:
        """All of it, for `decode`."""
        if self._encoded is None:
            stored = None if self._stored is None else asdict(self._stored)
            self._encoded = bytes(msgpack.packb([self._owner, self._last_step, stored, list(self._replaced)]))
        return self._encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Sessions:
        """The inverse of `encode`. Raises ValueError, TypeError, FrameError or msgpack's own for anything else."""
        sessions = cls()
        owner, last_step, stored, replaced = msgpack.unpackb(encoded, max_ext_len=0)
        sessions._owner, sessions._last_step = owner, int(last_step)
        sessions._stored = None if stored is None else answer_from_map(CotuneAnswer, stored)
        sessions._replaced = dict.fromkeys(replaced)
        return sessions
