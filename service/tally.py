"""What came in since the start, and the summary line a second that is made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(slots=True)
class Tally:
    """Counts since the daemon started."""

    batches: int = 0
    """Batches counted."""
    actions: int = 0
    """Actions counted."""
    rejected: int = 0
    """Batches rejected; their actors are told."""
    duplicate: int = 0
    """Batches that came again."""
    early: int = 0
    """Batches that came before a missing one."""
    unknown: int = 0
    """Batches of streams that are not open."""
    malformed: int = 0
    """Frames that were no batch."""
    queries: int = 0
    """Control messages answered, errors included."""
    undeliverable: int = 0
    """Answers whose asker was gone."""


class Summary:
    """Differences of a tally from one summary to the next."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._before = replace(tally)

    def take(self) -> dict[str, int] | None:
        """What was added since the last call, without zeros; None if nothing."""
        now, before = asdict(self._tally), asdict(self._before)
        self._before = replace(self._tally)
        added = {name: now[name] - before[name] for name in now if now[name] != before[name]}
        return added or None
