"""The engine: one thread that takes in batches, answers queries, and owns the bus.

One turn of the loop: wait until something is there; answer the queries that wait; take in at most one bounded drain
of batches; answer the acknowledgements that were waiting for them; publish rows that changed. Queries therefore wait
for at most one drain, however long the backlog is.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

from ..config.settings import Settings, is_loopback
from ..kernels import Drain, IsvBus, Rejection
from ..wire.codec import Batch, DeviceBatch, action_dtype, decode_batch, decode_control, encode_control
from ..wire.errors import FrameError, RequestRefused, StateUnavailable, Stopping
from ..wire.messages import Acknowledge, Cotune, Hello, Request, Write
from .changes import Changes
from .durability import Durability
from .held import Held
from .held_answers import HELD_SECONDS, HeldAnswers
from .logs import log
from .publisher import Publisher
from .queries import Queries
from .recorder import Recorder
from .report import Report, Reports, RunReport
from .requests import parse_request
from .restore import restore
from .runs import Runs
from .snapshot import Stored
from .sockets import Sockets
from .staging import Staged, Staging
from .streams import Stream, Streams, Verdict
from .tally import Summary, Tally
from .whole_drain import take_whole
from .writer import Writer

QUERIES_A_TURN = 256
DEVICE_BATCHES_A_DRAIN = 64
"""Batches in an actor's GPU memory are counted one by one, each with a wait for the GPU; queries come in between."""
LONGEST_WAIT = 0.1
"""Seconds without looking at the stop flag and the clock."""
REMINDER_INTERVAL = 60.0
"""Seconds between reminders that the daemon is reachable from outside without protection."""
DRAIN_ON_STOP = 2.0
"""Seconds that batches which have already arrived get when the daemon stops."""
COMMIT_ON_STOP = 5.0
"""Seconds that the last commit gets; with the above and the writer's two, less than the ten after which containers are
killed."""


class Engine:
    """See the module.

    Args:
        settings: limits and intervals.
        bus: owned by the engine's thread from now on; closed by whoever opened it.
        sockets: bound; closed by whoever opened them.
        recorder: gets every batch that counted; None: nobody does.
        writer: gets the state; None: it is not kept.
        stored: what was kept before.
    """

    def __init__(
        self,
        settings: Settings,
        bus: IsvBus,
        sockets: Sockets,
        recorder: Recorder | None = None,
        writer: Writer | None = None,
        stored: Stored | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._sockets = sockets
        self._guard = sockets.guard
        self._recorder = recorder
        self.tally = Tally()
        self._dtype = action_dtype(settings.n_actions)
        self._left: tuple[list[bytes], list[str | None]] | None = None  # received, not yet looked at
        self._changes = Changes()
        self._durability = Durability(settings, bus, self._changes, writer)
        self._runs = Runs(settings, bus, self._changes)
        limits = settings.limits
        self._streams = Streams(limits.max_actors, limits.actor_expiry, self._changes, writer is not None)
        if stored is not None:
            restore(stored, self._runs, self._streams, guarded=self._guard is not None)
        if writer is not None:
            sockets.wake_on(writer.wake)
        self._staging = Staging(settings.n_actions)
        self._publisher = Publisher(sockets, bus, settings.publish_interval)
        self._queries = Queries(
            settings,
            bus,
            self._runs,
            self._streams,
            sockets.endpoints,
            self.tally,
            self._changes,
            self._durability,
        )
        self._held = Held()
        self._held_answers = HeldAnswers()
        self._summary = Summary(self.tally)
        listening = sockets.endpoints.values() if self._guard is None else ()
        self._exposed = [endpoint for endpoint in listening if not is_loopback(endpoint)]
        self._generation = secrets.randbits(63)
        self._started = time.monotonic()
        self.reports = Reports(self._report)
        self._stop = False

    def stop(self) -> None:
        """Asks `run` to end; safe in a signal handler and from another thread."""
        self._stop = True

    def run(self) -> None:
        """Works until `stop`; then takes in what has already arrived, commits it and answers whoever waits.

        Raises:
            StateNotKept: the disk did not take the last commit.
        """
        next_summary = time.monotonic() + self._settings.log.interval
        next_reminder = time.monotonic()
        more = False
        while not self._stop:
            next_publish = self._publisher.publish_due()
            if not more:
                held_until = min(self._held.next_deadline(), self._held_answers.next_deadline())
                self._sockets.wait(min(LONGEST_WAIT, next_publish, held_until, self._durability.due_in()))
            self._sockets.look()
            self.serve_queries()
            more = self.drain()
            self._durability.collect()
            self._answer_held(self._can_answer)
            self._tell()
            self._durability.begin(more)
            self.reports.answer()
            if time.monotonic() >= next_summary:
                next_summary = time.monotonic() + self._settings.log.interval
                self._log_summary()
            if self._exposed and time.monotonic() >= next_reminder:
                next_reminder = time.monotonic() + REMINDER_INTERVAL
                log(logging.WARNING, "insecure", endpoints=self._exposed, why="reachable from outside, not encrypted")
        self._finish()

    # -- queries ------------------------------------------------------------------------------------------------

    def serve_queries(self) -> None:
        """Answers at most `QUERIES_A_TURN` of the control messages that wait."""
        for asker, frame in self._sockets.requests(QUERIES_A_TURN):
            self.tally.queries += 1
            request_id: Any = None
            try:
                message = decode_control(frame)
                del message["v"]
                request_id = message.pop("id", None)
                if type(request_id) is not int:
                    raise FrameError("got a request without an integer 'id', expected one to put on the answer")
                self._serve(asker, request_id, parse_request(message))
            except (FrameError, RequestRefused) as error:
                self._send(asker, request_id, error={"code": error.code, "message": str(error)})

    def _serve(self, asker: bytes, request_id: int, request: Request) -> None:
        if self._stop and isinstance(request, Cotune | Write):
            raise Stopping("the daemon is shutting down; ask again when it is back")
        sender = self._sockets.sender
        if self._guard is not None:
            self._guard.admit(sender, request, self._streams)
        answer, snapshot = self._queries.answer(request)
        if isinstance(request, Hello):
            self._streams.give(request.stream, sender)
        if isinstance(request, Cotune | Write):
            self._publisher.changed(self._runs.find(request.run))
        if isinstance(request, Acknowledge) and request.wait_ms and not self._can_answer(request):
            self._held.hold(asker, request_id, request)
            return
        content = asdict(cast(Any, answer)) if answer is not None else {}
        if self._durability.holds(snapshot):
            self._send(asker, request_id, answer=content)
        else:
            self._held_answers.hold(snapshot, asker, request_id, content)

    def _can_answer(self, request: Acknowledge) -> bool:
        stream = self._streams.get(request.stream)
        if stream is None or stream.gap or self._streams.durable(stream) >= request.wait_for:
            return True
        if stream.last >= request.wait_for:
            self._durability.hurry()  # a commit is all that is missing
        return False

    def _answer_held(self, ready: Callable[[Acknowledge], bool]) -> None:
        failing = self._durability.failure is not None
        for asker, request_id, request in self._held.take(ready):
            self._send(asker, request_id, answer=asdict(self._streams.acknowledge(request, failing)))

    def _tell(self, stopping: bool = False) -> None:
        """Sends the held answers whose change is on disk by now; those that waited too long become errors."""
        for held in self._held_answers.take_durable(self._durability.committed):
            self._send(held.asker, held.request_id, answer=held.content)
        for held in self._held_answers.take_overdue(stopping):
            why = f"the change was not on the daemon's disk within {HELD_SECONDS:g} s; ask again, a step counts once"
            self._send(held.asker, held.request_id, error={"code": StateUnavailable.code, "message": why})
        if self._held_answers:
            self._durability.hurry()

    def _send(self, asker: bytes, request_id: Any, **content: Any) -> None:
        if not self._sockets.answer(
            asker, encode_control({"id": request_id, "generation": self._generation, **content})
        ):
            self.tally.undeliverable += 1

    # -- batches ------------------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Takes in at most one drain of the batches that have arrived; whether there may be more."""
        limits = self._settings.limits
        frames, senders = self._left or self._sockets.batches(limits.drain_batches, limits.drain_bytes)
        self._left = None
        if not frames:
            return False
        whole = None
        if self._guard is None and self._recorder is None:  # both look at batches one by one
            whole = take_whole(frames, self._streams, self._dtype)
        if whole is not None:
            self._count(whole.drain, whole.streams, whole.batch)
        else:
            self._take_one_by_one(frames, senders)
        return True

    def _take_one_by_one(self, frames: list[bytes], senders: list[str | None]) -> None:
        on_device = 0
        for place, frame in enumerate(frames):
            try:
                batch = decode_batch(frame, self._dtype.itemsize)
            except FrameError as error:
                self.tally.malformed += 1
                log(logging.DEBUG, "malformed frame", error=str(error))
                continue
            self._take(batch, senders[place])
            on_device += isinstance(batch, DeviceBatch)
            if on_device >= DEVICE_BATCHES_A_DRAIN:
                self._left = frames[place + 1 :], senders[place + 1 :]
                break
        if len(self._staging):
            self._observe()

    def _take(self, batch: Batch | DeviceBatch, sender: str | None) -> None:
        stream = self._streams.get(batch.stream)
        if stream is None or stream.owner != sender:  # both None without CURVE
            self.tally.unknown += 1
            return
        # Memory that was shared with an earlier daemon is not mapped by this one until its actor shares it again.
        unmapped = isinstance(batch, DeviceBatch) and stream.memory is None
        match stream.put_off() if unmapped else stream.judge(batch.sequence):
            case Verdict.TAKE:
                if isinstance(batch, DeviceBatch):
                    self._take_from_device(stream, batch)
                else:
                    self._staging.add(stream, batch)
            case Verdict.DUPLICATE:
                self.tally.duplicate += 1
            case Verdict.EARLY:
                self.tally.early += 1

    def _take_from_device(self, stream: Stream, batch: DeviceBatch) -> None:
        """Counts a batch where it lies, after those of its run that came before it."""
        if len(self._staging):
            self._observe()
        sharing, memory = self._bus.sharing, stream.memory
        assert sharing is not None
        assert memory is not None
        rejection = sharing.observe(stream.run.row, memory, batch)
        self._publisher.changed(stream.run)
        self._changes.changed(stream.run)
        if rejection is not None:
            self._reject(stream, batch.sequence, rejection)
            return
        self.tally.batches += 1
        self.tally.actions += batch.n
        if self._recorder is not None:
            actions = sharing.download(memory, batch)
            self._record([(stream, Batch(*batch[:4], actions))], set())

    def _observe(self) -> None:
        drain, staged = self._staging.take()
        streams = {stream.number: stream for stream, _ in staged}.values()
        rejections = self._count(drain, streams, lambda place: (staged[place][0], staged[place][1].sequence))
        if self._recorder is not None:
            self._record(staged, {rejection.batch for rejection in rejections})

    def _count(
        self, drain: Drain, streams: Iterable[Stream], batch: Callable[[int], tuple[Stream, int]]
    ) -> list[Rejection]:
        """Hands a drain of these streams to the bus; `batch` tells the stream and number of the batch at a place."""
        rejections = self._bus.observe(drain)
        self.tally.batches += int(drain.lengths.size) - len(rejections)
        self.tally.actions += int(drain.lengths.sum())
        for rejection in rejections:
            self._reject(*batch(rejection.batch), rejection)
            self.tally.actions -= int(drain.lengths[rejection.batch])
        for run in {stream.run.row: stream.run for stream in streams}.values():
            self._publisher.changed(run)
            self._changes.changed(run)
        return rejections

    def _reject(self, stream: Stream, sequence: int, rejection: Rejection) -> None:
        stream.rejections.append((sequence, rejection.code, rejection.message))
        self._changes.rejections_changed(stream)
        self.tally.rejected += 1
        log(
            logging.DEBUG,
            "batch rejected",
            run=stream.run.name,
            actor=stream.actor,
            batch=sequence,
            code=rejection.code,
            reason=rejection.message,
        )

    def _record(self, staged: list[Staged], rejected: set[int]) -> None:
        # `staged` is in order of arrival within each run, which is all that the bus's result depends on.
        with self._recording() as recorder:
            for place, (stream, batch) in enumerate(staged):
                if place not in rejected:
                    recorder.write(stream.run.name, stream.actor, batch)

    @contextmanager
    def _recording(self) -> Generator[Recorder, None, None]:
        """A disk that fails ends the record, loudly, and not the training that it is a record of."""
        assert self._recorder is not None
        try:
            yield self._recorder
        except OSError as error:
            log(logging.ERROR, "record ended", path=self._recorder.path, error=str(error))
            self._recorder.close()
            self._recorder = None

    # -- reports ------------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        runs = [
            RunReport(run.name, len(run.streams), run.batches_duplicate, run.batches_early, self._bus.row(run.row))
            for run in self._runs
        ]
        uptime = time.monotonic() - self._started
        troubles = [] if self._guard is None else list(self._guard.troubles)
        if self._durability.failure is not None:
            troubles.append(f"the state cannot be written: {self._durability.failure}")
        if self._stop:
            troubles.append("the daemon is shutting down")
        tally, n_streams = replace(self.tally), len(self._streams)
        return Report(uptime, self._bus.device, self._settings.n_actions, n_streams, tally, runs, tuple(troubles))

    # -- the clock and the end ----------------------------------------------------------------------------------

    def _log_summary(self) -> None:
        if self._recorder is not None:
            with self._recording() as recorder:
                recorder.flush()
        added = self._summary.take()
        if added is not None:
            bad = {"rejected", "malformed", "unknown", "undeliverable"} & set(added)
            log(logging.WARNING if bad else logging.INFO, "load", seconds=self._settings.log.interval, **added)

    def _finish(self) -> None:
        deadline = time.monotonic() + DRAIN_ON_STOP
        while self.drain() and time.monotonic() < deadline:
            pass
        self.serve_queries()
        try:
            self._durability.finish(COMMIT_ON_STOP)
        finally:
            self._answer_held(lambda _: True)
            self._tell(stopping=True)
            self._log_summary()
