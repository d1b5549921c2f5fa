"""Learner sessions of one run: who owns tuning, and which step was answered with what."""

from __future__ import annotations

from enum import Enum

from ..wire.answers import CotuneAnswer

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

    @property
    def stored(self) -> CotuneAnswer | None:
        """The answer to the owner's last new step."""
        return self._stored

    def turn(self, session: int, step: int) -> Turn:
        """Says what the request is; a session not seen before becomes the owner."""
        if session in self._replaced:
            return Turn.NOT_OWNER
        if session != self._owner:
            if self._owner is not None:
                self._replaced[self._owner] = None
                if len(self._replaced) > _REMEMBERED:
                    del self._replaced[next(iter(self._replaced))]
            self._owner, self._last_step, self._stored = session, -1, None
        return Turn.NEW_STEP if step > self._last_step else Turn.REPEATED

    def answered(self, step: int, answer: CotuneAnswer) -> None:
        """Stores the answer to a new step."""
        self._last_step, self._stored = step, answer
