"""Actor streams: each takes its batches once and in order, whatever the transport repeats, loses or reorders."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ..kernels import SharedMemory
from ..wire.answers import AcknowledgeAnswer
from ..wire.errors import InvalidRequest, LimitReached
from ..wire.messages import Acknowledge, Hello
from .changes import Changes
from .runs import Run
from .snapshot import StreamRecord

MAX_KEPT_REJECTIONS = 100
"""Rejections that a stream keeps until its actor has seen them; the newest are kept, the counter is exact."""


class Verdict(Enum):
    """What to do with a batch."""

    TAKE = "the next one"
    DUPLICATE = "taken before"
    EARLY = "one before it is missing"


@dataclass(slots=True)
class Stream:
    """One life of an actor client."""

    number: int
    actor: str
    run: Run
    last: int
    """Number of the last batch taken: counted, or rejected."""
    durable: int
    """Number of the last batch taken that is on disk. Means nothing where no state is kept."""
    asked_at: float
    """When its actor last asked; monotonic seconds."""
    gap: bool = False
    """A batch came too early since the last one was taken."""
    rejections: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_REJECTIONS))
    memory: SharedMemory | None = None
    """GPU memory that the actor shares."""
    owner: str | None = None
    """Public key that opened it; None without CURVE."""

    def share(self, memory: SharedMemory | None) -> None:
        """From now on batches may be taken out of this memory, and not out of what was shared before."""
        if self.memory is not None:
            self.memory.close()
        self.memory = memory

    def judge(self, sequence: int) -> Verdict:
        """Takes the next batch's number, and only that."""
        if sequence == self.last + 1:
            self.took(1)
            return Verdict.TAKE
        if sequence <= self.last:
            self.run.batches_duplicate += 1
            return Verdict.DUPLICATE
        return self.put_off()

    def took(self, n: int) -> None:
        """The next `n` batches were taken."""
        self.last += n
        self.gap = False

    def put_off(self) -> Verdict:
        """Does not take a batch; its actor is told to send again from the first that was not taken."""
        self.gap = True
        self.run.batches_early += 1
        return Verdict.EARLY

    def record(self) -> StreamRecord:
        """What is written when it was opened."""
        return StreamRecord(self.number, self.run.name, self.actor, list(self.rejections), self.owner)


class Streams:
    """All open streams by number.

    Args:
        max_actors: most streams at a time.
        expiry: seconds after which a stream that nobody asked about may make room for a new one. Actors that were
            killed leave such streams behind; living ones ask several times a second while they push.
        changes: is told of streams that open and close, and of rejections that were seen.
        keeps_state: whether snapshots are written, so that durable is less than applied.
    """

    def __init__(self, max_actors: int, expiry: float, changes: Changes, keeps_state: bool) -> None:
        self._max_actors = max_actors
        self._expiry = expiry
        self._changes = changes
        self._keeps_state = keeps_state
        self._by_number: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def get(self, number: int) -> Stream | None:
        """The stream, or None."""
        return self._by_number.get(number)

    def open(self, hello: Hello, run: Run) -> tuple[Stream, bool]:
        """The stream that the actor means, and whether it was known before.

        Raises:
            LimitReached: too many streams are open.
            InvalidRequest: the stream is open for another run.
        """
        now = time.monotonic()
        stream = self._by_number.get(hello.stream)
        if stream is not None:
            if stream.run is not run:
                raise InvalidRequest(
                    f"run: got {run.name!r} for a stream of run {stream.run.name!r}; open one client for each run"
                )
            stream.asked_at = now
            return stream, True
        if len(self._by_number) >= self._max_actors and not self._make_room(now):
            raise LimitReached(
                f"actor: {len(self._by_number)} streams are open, limits.max_actors allows no more; close clients that "
                "are done (close() or a with block), or raise the limit"
            )
        stream = Stream(hello.stream, hello.actor, run, hello.base, hello.base, now)
        self._add(stream)
        self._changes.stream_opened(stream)
        return stream, False

    def _add(self, stream: Stream) -> None:
        self._by_number[stream.number] = stream
        stream.run.streams[stream.number] = stream

    def restore(self, record: StreamRecord, run: Run, last: int) -> None:
        """A stream as it was written."""
        stream = Stream(record.number, record.actor, run, last, last, time.monotonic(), owner=record.owner)
        stream.rejections.extend(record.rejections)
        self._add(stream)

    def durable(self, stream: Stream) -> int:
        """Number of the last batch that survives the daemon, or that is applied if it keeps no state."""
        return stream.durable if self._keeps_state else stream.last

    def give(self, number: int, owner: str | None) -> None:
        """The open stream belongs to this key."""
        self._by_number[number].owner = owner

    def acknowledge(self, request: Acknowledge, state_failing: bool) -> AcknowledgeAnswer:
        """Forgets the rejections that the actor has seen, and answers how far its stream has come."""
        stream = self._by_number.get(request.stream)
        if stream is None:
            return AcknowledgeAnswer(False, 0, 0, False, [], state_failing)
        stream.asked_at = time.monotonic()
        if stream.rejections and stream.rejections[0][0] <= request.rejections_seen:
            while stream.rejections and stream.rejections[0][0] <= request.rejections_seen:
                stream.rejections.popleft()
            self._changes.rejections_changed(stream)
        durable = self.durable(stream)
        return AcknowledgeAnswer(True, stream.last, durable, stream.gap, list(stream.rejections), state_failing)

    def close(self, number: int) -> None:
        """Forgets a stream; an unknown one is no fault, since goodbyes may be repeated."""
        stream = self._by_number.pop(number, None)
        if stream is not None:
            stream.share(None)
            del stream.run.streams[number]
            self._changes.stream_closed(stream)

    def _make_room(self, now: float) -> bool:
        oldest = min(self._by_number.values(), key=lambda stream: stream.asked_at)
        if now - oldest.asked_at < self._expiry:
            return False
        self.close(oldest.number)
        return True
