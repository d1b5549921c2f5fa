"""`ActorClient`: pushes the executed actions of one actor process, each batch counted exactly once."""

from __future__ import annotations

import math
import os
import secrets
import socket as hostnames
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq

from ..wire.answers import AcknowledgeAnswer, HelloAnswer, answer_from_map
from ..wire.codec import PHASES, Batch, action_dtype, encode_batch
from ..wire.connection import Connection, check_timeout, default_endpoint, set_common_options
from ..wire.errors import (
    BatchRejected,
    CotunedError,
    DaemonUnreachable,
    FlushTimeout,
    InvalidActions,
    StreamLost,
    WindowFull,
)
from ..wire.messages import Acknowledge, Goodbye, Hello
from ..wire.protocol import DEFAULT_RUN, MAX_SEQUENCE
from .arrays import as_actions, as_rows, row_entropies

_ASK_EVERY_BATCHES = 256
_ASK_EVERY_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
"""An acknowledgement that has not come by then is asked for again: the daemon may have been restarted."""
_RESEND_SECONDS = 1.0
"""Everything was sent and nothing moved for this long: the transport lost it."""
_RESEND_PAUSE_SECONDS = 0.25
"""After a resend the daemon gets this long before a gap makes us resend again."""


class ActorClient:
    """One actor's numbered stream of batches. Opens it with the daemon at once.

    Terms: a batch is *sent* when `push` returned, *applied* when the daemon has counted it, *durable* when it also
    survives a crash of the daemon. Until `cotuned` keeps its state on disk, durable means applied. The client keeps
    every batch that is not durable, at most `window` of them, and sends it again after a loss or a restart of the
    daemon; the daemon takes each number once. Resending happens inside `push`, `flush` and `close`: there is no thread.

    Use one client in one thread at a time, and open it after a fork, not before.

    Args:
        endpoint: the daemon's queries endpoint; the one for batches is learned from it. None:
            ``$COTUNED_ENDPOINT``, else ``tcp://127.0.0.1:5584``.
        run: name of the training job; the first to name it creates it.
        actor: name of this actor, for people to read; two clients of one name are told apart. Default: host and pid.
        n_actions: K that the actor was built for, checked against the daemon's. None: take the daemon's.
        timeout: seconds that a call may wait, unless it says otherwise.
        window: most batches that may be waiting to become durable.
        window_bytes: most bytes of them; the batch that passes this limit is still taken.
        on_rejected: called with each `BatchRejected`, from inside `push` or `flush`. None: they are raised there.
        actions_endpoint: where to push, if not where the daemon says (for instance behind port mapping).

    Raises:
        DaemonUnreachable: nothing answered within the timeout.
        RequestRefused: the daemon refused the stream; the subclass says why.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        run: str = DEFAULT_RUN,
        actor: str | None = None,
        n_actions: int | None = None,
        timeout: float = 5.0,
        window: int = 4096,
        window_bytes: int = 64 * 2**20,
        on_rejected: Callable[[BatchRejected], None] | None = None,
        actions_endpoint: str | None = None,
    ) -> None:
        if window < 1 or window_bytes < 1:
            raise ValueError(f"window: got {window} batches, {window_bytes} bytes; expected at least 1 of each")
        self.run = run
        self.actor = actor if actor is not None else f"{hostnames.gethostname()[:48]}-{os.getpid()}"
        self.stream = secrets.randbits(63)
        self._wanted_actions = n_actions
        self._window_limit, self._window_bytes_limit = window, window_bytes
        self._on_rejected = on_rejected
        self._last = 0  # number of the newest batch
        self._durable = 0
        self._applied = 0
        self._window: deque[bytes] = deque()  # frames of batches durable + 1 … last
        self._window_bytes = 0
        self._cursor = 1  # number of the next frame to hand to the transport
        self._asked: tuple[int, float] | None = None  # request id and deadline of the acknowledgement under way
        self._asked_at_batch, self._asked_at = 0, 0.0
        self._moved_at = time.monotonic()
        self._resent_at = -math.inf
        self._rejections: deque[BatchRejected] = deque()
        self._rejections_seen = 0
        hello = Hello(self.actor, self.stream, 0, run, n_actions)  # checked before a socket is opened
        self._connection = Connection(endpoint or default_endpoint(), timeout)
        try:
            answer = self._connection.ask(hello, HelloAnswer)
            self.n_actions = answer.n_actions
            self._max_frame_bytes = answer.max_frame_bytes
            self._push = self._connection.context.socket(zmq.PUSH)
            set_common_options(self._push)
            self._push.immediate = True  # never queue into a connection that is not there: we resend ourselves
            self._push.sndhwm = 2 * window
            self._push.connect(actions_endpoint or _reachable(answer.actions_endpoint, self._connection.endpoint))
        except BaseException:
            self._connection.close()
            raise

    # -- pushing ------------------------------------------------------------------------------------------------

    def push(
        self,
        executed: Any,
        proposed: Any = None,
        probs: Any = None,
        *,
        step: int = 0,
        phase: Literal["train", "prefill"] = "train",
        timeout: float | None = None,
    ) -> int:
        """Sends one batch: the actions of one step that were really executed, behind the last gate.

        Returns when the batch is sent (kept here and handed to the transport), not when it is applied; `flush` waits
        for that. An empty batch changes nothing and is not sent.

        Args:
            executed: action indices, integers [n], in [0, K); NumPy, torch, CuPy or a sequence.
            proposed: the policy's own choices before the gates, integers [n]; gives the daemon the gate rate.
            probs: post-gate rows [n, K], what each executed action was drawn from (`ChainOutcome.probs`); gives the
                daemon the conditional executed entropy. Only the sum of the rows' entropies is sent.
            step: the actor's own step, kept for the record.
            phase: "prefill" while the replay buffer is filled by a policy that is not trained yet.
            timeout: seconds to wait for room in the window; None: the client's.

        Returns:
            The batch's number in this stream (the last one's for an empty batch).

        Raises:
            InvalidActions: the batch cannot be sent; nothing was.
            WindowFull: no room came free in time; the batch was not sent, push it again.
            BatchRejected: the daemon rejected an *earlier* batch; this one was not sent, push it again.
            StreamLost: the daemon lost batches that it had confirmed.
        """
        self._connection.check_usable()
        frame = self._encode(executed, proposed, probs, step, phase)
        self._raise_rejection()
        if frame is None:
            return self._last
        self._wait_for_room(self._connection.timeout if timeout is None else check_timeout(timeout))
        self._last += 1
        self._window.append(frame)
        self._window_bytes += len(frame)
        self._transmit()
        self._follow_up()
        return self._last

    def _encode(self, executed: Any, proposed: Any, probs: Any, step: int, phase: str) -> bytes | None:
        if phase not in PHASES:
            raise InvalidActions(f'phase: got {phase!r}, expected "train" or "prefill"')
        if type(step) is not int:
            try:
                step = int(step.__index__())
            except (AttributeError, TypeError):
                raise InvalidActions(f"step: got {step!r}, expected an integer from 0") from None
        if not 0 <= step <= MAX_SEQUENCE:
            raise InvalidActions(f"step: got {step}, expected 0 to 2^63 - 1")
        dtype = action_dtype(self.n_actions)
        actions = as_actions(executed, self.n_actions)
        before = None
        if proposed is not None:
            before = as_actions(proposed, self.n_actions, "proposed")
            if before.shape != actions.shape:
                raise InvalidActions(
                    f"proposed: got {before.size} actions, expected {actions.size}, one for each executed"
                )
        row_entropy = None
        if probs is not None:
            row_entropy = float(row_entropies(as_rows(probs, actions.size, self.n_actions)).sum())
        if actions.size == 0:
            return None
        frame = encode_batch(
            Batch(
                self.stream,
                self._last + 1,
                PHASES.index(phase),
                step,
                actions.astype(dtype, copy=False).tobytes(),
                None if before is None else before.astype(dtype, copy=False).tobytes(),
                row_entropy,
            )
        )
        if len(frame) > self._max_frame_bytes:
            raise InvalidActions(
                f"executed: got {actions.size} actions, a frame of {len(frame)} bytes; the daemon takes at most "
                f"{self._max_frame_bytes} bytes (limits.max_frame_bytes). Push smaller batches"
            )
        return frame

    def _wait_for_room(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._window) >= self._window_limit or self._window_bytes >= self._window_bytes_limit:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WindowFull(
                    f"{len(self._window)} batches ({self._window_bytes} bytes) wait to become durable and none did "
                    f"within {seconds:g} s at {self._connection.endpoint}; is the daemon running and keeping up? "
                    "This batch was not sent"
                )
            self._advance(self._durable + 1, min(left, 0.1))

    # -- acknowledgements ---------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every batch pushed so far is durable (applied, as long as the daemon keeps no state on disk).

        Raises:
            FlushTimeout: some were not within `timeout` seconds (None: the client's); they are kept and sent again.
            BatchRejected: the daemon rejected one of them (the rest is durable); call again for the next one.
            StreamLost: the daemon lost batches that it had confirmed.
        """
        self._connection.check_usable()
        seconds = self._connection.timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + seconds
        while self._durable < self._last:
            left = deadline - time.monotonic()
            if left <= 0:
                raise FlushTimeout(
                    f"{self._last - self._durable} of {self._last} batches were not durable within {seconds:g} s at "
                    f"{self._connection.endpoint}; they are kept: flush again, and see whether the daemon runs"
                )
            self._advance(self._last, min(left, 0.5))
        self._raise_rejection()

    def _follow_up(self) -> None:
        """Now and then, without waiting: looks for an acknowledgement, asks for the next one."""
        if (
            self._asked is not None
            or self._last - self._asked_at_batch >= _ASK_EVERY_BATCHES
            or time.monotonic() - self._asked_at >= _ASK_EVERY_SECONDS
        ):
            self._advance(0, 0.0)

    def _advance(self, wait_for: int, seconds: float) -> None:
        """Sends what is to be sent, asks how far the daemon is unless that is under way, and takes its answer if it
        comes within `seconds`."""
        now = time.monotonic()
        if self._asked is not None and now >= self._asked[1]:
            self._asked = None
        if self._asked is None:
            wait_ms = int(seconds * 1000) if wait_for else 0
            try:
                request_id = self._connection.send(Acknowledge(self.stream, wait_for, wait_ms, self._rejections_seen))
            except DaemonUnreachable:
                time.sleep(min(seconds, 0.05))  # the request queue is full: nobody has taken one for long
                return
            self._asked = (request_id, now + wait_ms / 1000 + _ANSWER_SECONDS)
            self._asked_at, self._asked_at_batch = now, self._last
        self._transmit()
        message = self._connection.receive(self._asked[0], seconds)
        if message is not None:
            self._asked = None
            self._take(answer_from_map(AcknowledgeAnswer, message), seconds)

    def _take(self, answer: AcknowledgeAnswer, seconds: float) -> None:
        if not answer.known:
            self._say_hello_again()
            return
        if answer.durable < self._durable:
            raise StreamLost(
                f"the daemon at {self._connection.endpoint} confirmed batches up to {self._durable} and now knows "
                f"only {answer.durable}: it was started from older state. Open a new client to go on"
            )
        now = time.monotonic()
        if answer.applied > self._applied:
            self._applied, self._moved_at = answer.applied, now
        while self._durable < answer.durable:
            self._window_bytes -= len(self._window.popleft())
            self._durable += 1
        self._cursor = max(self._cursor, self._durable + 1)
        for sequence, code, sentence in answer.rejections:
            if sequence > self._rejections_seen:
                self._rejections_seen = sequence
                self._reject(BatchRejected(sequence, code, sentence))
        all_sent = self._cursor > self._last
        stuck = all_sent and self._applied < self._last and now - self._moved_at >= _RESEND_SECONDS
        if answer.gap or stuck:
            if now - self._resent_at >= _RESEND_PAUSE_SECONDS:
                self._resend(now)
            else:
                time.sleep(min(seconds, 0.01))  # what was sent again is under way; the daemon answers at once

    def _resend(self, now: float) -> None:
        """Go back to the first batch that is not applied."""
        self._cursor = self._applied + 1
        self._resent_at = self._moved_at = now
        self._transmit()

    def _say_hello_again(self) -> None:
        hello = Hello(self.actor, self.stream, self._durable, self.run, self._wanted_actions)
        answer = self._connection.ask(hello, HelloAnswer)
        if answer.n_actions != self.n_actions:
            raise CotunedError(
                f"the daemon at {self._connection.endpoint} came back with {answer.n_actions} actions, this client was "
                f"opened for {self.n_actions}; open a new client"
            )
        self._applied = answer.last
        self._resend(time.monotonic())

    def _transmit(self) -> None:
        """Hands frames to the transport, in order, as many as it takes without waiting."""
        try:
            while self._cursor <= self._last:
                self._push.send(self._window[self._cursor - self._durable - 1], zmq.DONTWAIT)
                self._cursor += 1
        except zmq.Again:
            pass  # not lost: the cursor stands on it, and every later call tries again

    def _reject(self, rejection: BatchRejected) -> None:
        if self._on_rejected is not None:
            self._on_rejected(rejection)
        else:
            self._rejections.append(rejection)

    def _raise_rejection(self) -> None:
        if self._rejections:
            raise self._rejections.popleft()

    # -- the end ------------------------------------------------------------------------------------------------

    @property
    def unconfirmed(self) -> int:
        """Batches pushed and not yet known to be durable."""
        return self._last - self._durable

    def close(self, timeout: float | None = None) -> None:
        """Flushes, ends the stream and closes the sockets. Closing twice does nothing.

        Raises:
            FlushTimeout, BatchRejected, StreamLost: as `flush`; the sockets are closed all the same.
        """
        if self._connection.closed:
            return
        try:
            self.flush(timeout)
            self._connection.send(Goodbye(self.stream))
            self._push.close(0)
            self._connection.close(linger_ms=200)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes at once, without a flush: batches that are not durable may be lost."""
        if not self._connection.closed:
            self._push.close(0)
            self._connection.close()

    def __enter__(self) -> ActorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CotunedError as failure:
            if error is None:
                raise
            error.add_note(f"and closing the ActorClient failed: {failure}")


def _reachable(actions_endpoint: str, endpoint: str) -> str:
    """The daemon says where it listens as it sees it ("0.0.0.0", a container's address): over TCP take its port, and
    the host by which this client reached it."""
    there, here = urlsplit(actions_endpoint), urlsplit(endpoint)
    if there.scheme != "tcp" or here.scheme != "tcp":
        return actions_endpoint
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp://{host}:{actions_endpoint.rpartition(':')[2]}"
