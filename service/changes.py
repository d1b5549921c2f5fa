"""What changed since the last snapshot was taken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runs import Run
    from .streams import Stream


class Changes:
    """Noted by whoever changes something; taken by `Durability`, which makes a snapshot of it."""

    def __init__(self) -> None:
        self.number = 1
        """Number of the snapshot that will hold what is noted now."""
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted."""
        self.since: float | None = None
        """When the first of them was noted; monotonic seconds. None: nothing changed."""
        self.runs: dict[str, Run] = {}
        self.opened: dict[int, Stream] = {}
        self.closed: list[int] = []
        self.rejections: dict[int, Stream] = {}

    def taken(self) -> None:
        """A snapshot was made of all this; the next one begins."""
        self.number += 1
        self.clear()

    def changed(self, run: Run) -> int:
        """The run's row, its sessions or its streams changed; the number of the snapshot that will hold it."""
        if self.since is None:
            self.since = time.monotonic()
        self.runs[run.name] = run
        return self.number

    def stream_opened(self, stream: Stream) -> None:
        """A new stream."""
        self.opened[stream.number] = stream
        self.changed(stream.run)

    def stream_closed(self, stream: Stream) -> None:
        """A stream that is forgotten."""
        self.opened.pop(stream.number, None)
        self.rejections.pop(stream.number, None)
        self.closed.append(stream.number)
        self.changed(stream.run)

    def rejections_changed(self, stream: Stream) -> None:
        """The stream has rejections that it had not, or its actor has seen some."""
        self.rejections[stream.number] = stream
        self.changed(stream.run)
