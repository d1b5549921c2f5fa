"""The actor's side of exactly-once delivery: a window of frames that are not durable yet, sent again when need be."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from urllib.parse import urlsplit

import zmq

from ..wire.answers import AcknowledgeAnswer, HelloAnswer, ShareAnswer, answer_from_map
from ..wire.connection import LOOK_SECONDS, Connection
from ..wire.errors import BatchRejected, CotunedError, DaemonUnreachable, FlushTimeout, StreamLost, WindowFull
from ..wire.messages import Acknowledge, Goodbye, Hello, Share

_ASK_EVERY_BATCHES = 256
_ASK_EVERY_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
"""An acknowledgement that has not come by then is asked for again: the daemon may have been restarted."""
_RESEND_SECONDS = 1.0
"""Everything was sent and nothing moved for this long: the transport lost it."""
_REFUSED_SECONDS = 5.0
"""Nothing can be sent and nothing moved for this long, though the daemon answers."""
_UNSENT_SECONDS = 0.01
"""How long to wait for an answer before trying again to send what the transport did not take."""
_CONNECT_MS = 1_000
_RESEND_PAUSE_SECONDS = 0.25
"""After a resend the daemon gets this long before a gap makes us resend again."""


class Delivery:
    """One stream of numbered frames, delivered by go-back-N.

    Frames ``durable + 1 … last`` are kept. `_cursor` is the number of the next frame to hand to the transport: it moves
    on with what is sent, and back to ``applied + 1`` when something was lost.

    Args:
        connection: to the daemon's queries endpoint; closed by `close`.
        hello: opens the stream.
        window: most frames kept.
        window_bytes: most bytes of them; the frame that passes this limit is still taken.
        actions_endpoint: where to push, if not where the daemon says.

    Raises:
        DaemonUnreachable, RequestRefused: the daemon did not answer, or refused the stream (or our keys).
    """

    def __init__(
        self, connection: Connection, hello: Hello, window: int, window_bytes: int, actions_endpoint: str | None
    ) -> None:
        self._connection = connection
        self._hello = hello
        self._limit, self._bytes_limit = window, window_bytes
        # What a Ctrl-C may interrupt between two steps is derived, not counted: numbers stand with their frames.
        self._frames: deque[tuple[int, bytes]] = deque()
        self._confirmed = 0
        self._applied = 0
        self._state_failing = False
        self._bytes = 0
        self._cursor = 1
        self._asked: tuple[int, float] | None = None  # request id and deadline of the acknowledgement under way
        self._asked_at_frame, self._asked_at = 0, 0.0
        self._moved_at = time.monotonic()
        self._resent_at = -math.inf
        self._share: Share | None = None
        self._shared_with: int | None = None  # generation of the daemon that has mapped it
        self.rejections: deque[BatchRejected] = deque()
        """Rejections that nobody has taken yet, oldest first."""
        self._rejections_seen = 0
        self._push = connection.open_socket(zmq.PUSH)
        self._push.immediate = True  # never queue into a connection that is not there: we resend ourselves
        self._push.sndhwm = 2 * window
        if actions_endpoint is not None:
            connection.connect(self._push, actions_endpoint)
        self.terms = connection.ask(hello, HelloAnswer)
        """What the daemon said when the stream was opened."""
        if actions_endpoint is None:
            connection.connect(self._push, _reachable(self.terms.actions_endpoint, connection.endpoint))
        self._push.poll(_CONNECT_MS, zmq.POLLOUT)  # not needed, but the first flush would wait for it

    @property
    def last(self) -> int:
        """Number of the newest frame."""
        return self._frames[-1][0] if self._frames else self._confirmed

    @property
    def durable(self) -> int:
        """Number of the last frame that the daemon confirmed as durable."""
        return self._frames[0][0] - 1 if self._frames else self._confirmed

    def send(self, frame: bytes, seconds: float) -> int:
        """Takes one frame, whose number must be ``last + 1``, and returns that number.

        Raises:
            WindowFull: no room came free within `seconds`; the frame was not taken.
        """
        self.wait_for_room(seconds)
        self._frames.append((self.last + 1, frame))
        # Begun anew with an empty window, so what a Ctrl-C made it miss does not stay.
        self._bytes = self._bytes + len(frame) if len(self._frames) > 1 else len(frame)
        self._transmit()
        many = self.last - self._asked_at_frame >= _ASK_EVERY_BATCHES
        if self._asked is not None or many or time.monotonic() - self._asked_at >= _ASK_EVERY_SECONDS:
            self._advance(0, 0.0)
        return self.last

    def share(self, request: Share) -> None:
        """Offers GPU memory to the daemon, and again to each that follows it, before frames are sent again.

        Raises:
            DeviceNotShared: the daemon cannot map it; nothing changed.
        """
        self._connection.ask_inside(request, ShareAnswer, self._connection.timeout)
        self._share, self._shared_with = request, self._connection.generation

    def wait_for_room(self, seconds: float) -> None:
        """Returns when a frame can be taken.

        Raises:
            WindowFull: no room came free within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while len(self._frames) >= self._limit or self._bytes >= self._bytes_limit:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WindowFull(
                    f"{len(self._frames)} batches ({self._bytes} bytes) wait to become durable and none did "
                    f"within {seconds:g} s at {self._connection.endpoint}; {self._likely_cause()} "
                    "This batch was not sent"
                )
            self.wait_for_one(min(left, 0.1))

    def wait_for_one(self, seconds: float) -> None:
        """Waits at most `seconds` for the oldest frame to become durable."""
        self._advance(self.durable + 1, seconds)

    def flush(self, seconds: float) -> None:
        """Returns when every frame is durable.

        Raises:
            FlushTimeout: some were not within `seconds`; they are kept.
        """
        deadline = time.monotonic() + seconds
        while self.durable < self.last:
            left = deadline - time.monotonic()
            if left <= 0:
                raise FlushTimeout(
                    f"{self.last - self.durable} of {self.last} batches were not durable within {seconds:g} s at "
                    f"{self._connection.endpoint}; they are kept: flush again; {self._likely_cause()}"
                )
            self._advance(self.last, min(left, 0.5))

    def _likely_cause(self) -> str:
        if self._state_failing and self._applied > self.durable:
            return "the daemon reports that its disk does not take its state (its log says why)."
        return "is the daemon running and keeping up?"

    def _advance(self, wait_for: int, seconds: float) -> None:
        """Sends what is to be sent, asks how far the daemon is unless that is under way, and takes its answer if it
        comes within `seconds`."""
        now = time.monotonic()
        if self._asked is not None and now >= self._asked[1]:
            self._asked = None
            if seconds > 0:  # a push that does not wait is not held up by a look
                self._connection.check_admitted(min(seconds, LOOK_SECONDS))
        if self._cursor <= self.last:
            seconds = min(seconds, _UNSENT_SECONDS)  # the daemon must not hold its answer for what it cannot have yet
        if self._asked is None:
            wait_ms = int(seconds * 1000) if wait_for else 0
            request = Acknowledge(self._hello.stream, wait_for, wait_ms, self._rejections_seen)
            try:
                request_id = self._connection.send(request)
            except DaemonUnreachable:  # the request queue is full: nobody has taken one for long, or we were refused
                if seconds > 0 and self._connection.check_admitted(min(seconds, LOOK_SECONDS)):
                    self._connection.reconnect_all()
                return
            self._asked = (request_id, now + wait_ms / 1000 + _ANSWER_SECONDS)
            self._asked_at, self._asked_at_frame = now, self.last
        self._transmit()
        message = self._connection.receive(self._asked[0], seconds)
        if message is not None:
            self._asked = None
            self._take(answer_from_map(AcknowledgeAnswer, message), seconds)

    def _take(self, answer: AcknowledgeAnswer, seconds: float) -> None:
        if not answer.known:
            self._say_hello_again()
            return
        if self._share is not None and self._shared_with != self._connection.generation:
            self.share(self._share)
        if answer.durable < self.durable:
            raise self._stream_lost(answer.durable)
        now = time.monotonic()
        restarted = answer.applied < self._applied  # what was applied and not durable went with the old daemon
        if answer.applied != self._applied:
            self._applied, self._moved_at = answer.applied, now
        self._state_failing = answer.state_failing
        self._confirmed = max(self._confirmed, answer.durable)
        while self._frames and self._frames[0][0] <= answer.durable:
            self._bytes -= len(self._frames[0][1])
            self._frames.popleft()
        self._cursor = max(self._cursor, self.durable + 1)
        for sequence, code, sentence in answer.rejections:
            if sequence > self._rejections_seen:
                self._rejections_seen = sequence
                self.rejections.append(BatchRejected(sequence, code, sentence))
        all_sent = self._cursor > self.last
        if not all_sent and now - self._moved_at >= _REFUSED_SECONDS:
            self._connection.reconnect(self._push)  # the daemon answers, and this socket was refused for good
            self._resend(now)
        stuck = all_sent and self._applied < self.last and now - self._moved_at >= _RESEND_SECONDS
        if answer.gap or stuck or restarted:
            if restarted or now - self._resent_at >= _RESEND_PAUSE_SECONDS:
                self._resend(now)
            else:
                time.sleep(min(seconds, 0.01))  # what was sent again is under way; the daemon answers at once

    def _stream_lost(self, known: int) -> StreamLost:
        return StreamLost(
            f"the daemon at {self._connection.endpoint} confirmed batches up to {self.durable} and now knows only "
            f"{known}: it was started from older state. Open a new client to go on"
        )

    def _resend(self, now: float) -> None:
        """Goes back to the first frame that is not applied."""
        self._cursor = self._applied + 1
        self._resent_at = self._moved_at = now
        self._transmit()

    def _say_hello_again(self) -> None:
        request = replace(self._hello, base=self.durable)
        answer = self._connection.ask_inside(request, HelloAnswer, self._connection.timeout)
        if answer.n_actions != self.terms.n_actions:
            raise CotunedError(
                f"the daemon at {self._connection.endpoint} came back with {answer.n_actions} actions, this client was "
                f"opened for {self.terms.n_actions}; open a new client"
            )
        if answer.last < self.durable:
            raise self._stream_lost(answer.last)
        if self._share is not None:
            self.share(self._share)
        self._applied = answer.last
        self._resend(time.monotonic())

    def _transmit(self) -> None:
        """Hands frames to the transport, in order, as many as it takes without waiting."""
        try:
            while self._cursor <= self.last:
                self._push.send(self._frames[self._cursor - self.durable - 1][1], zmq.DONTWAIT)
                self._cursor += 1
        except zmq.Again:
            pass  # not lost: the cursor stands on it, and every later call tries again

    def close(self, goodbye: bool) -> None:
        """Closes the sockets at once; with `goodbye` the daemon is told that the stream has ended."""
        linger_ms = 0
        if goodbye:
            self._connection.send(Goodbye(self._hello.stream))
            linger_ms = 200
        self._connection.close(linger_ms)


def _reachable(actions_endpoint: str, endpoint: str) -> str:
    """The daemon says where it listens as it sees it ("0.0.0.0", a container's address): over TCP take its port, and
    the host by which this client reached it."""
    there, here = urlsplit(actions_endpoint), urlsplit(endpoint)
    if there.scheme != "tcp" or here.scheme != "tcp":
        return actions_endpoint
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{host}:{actions_endpoint.rpartition(':')[2]}"
