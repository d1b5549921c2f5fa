"""`ActorClient`: pushes the executed actions of one actor process, each batch counted exactly once."""

from __future__ import annotations

import atexit
import os
import secrets
import socket as hostnames
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from ..wire.codec import PHASES, Batch, DeviceBatch, action_dtype, encode_batch
from ..wire.connection import Connection, check_timeout, default_endpoint
from ..wire.errors import BatchRejected, CotunedError, InvalidActions, WindowFull
from ..wire.keys import Keys, keys_from_environment
from ..wire.messages import Hello
from ..wire.protocol import DEFAULT_RUN, MAX_SEQUENCE
from .arrays import as_actions, as_rows, index, row_entropies
from .delivery import Delivery
from .device_window import DeviceWindow, Ring, device_of

MAX_WINDOW = 2**20
"""Most batches of a window."""

_open_clients: weakref.WeakSet[ActorClient] = weakref.WeakSet()


@atexit.register
def _close_open_clients() -> None:
    """A script that ends without close() still delivers what it pushed, or says that it could not."""
    for client in list(_open_clients):
        client._close_forgotten(client._connection.timeout)  # pyright: ignore[reportPrivateUsage]


class ActorClient:
    """One actor's numbered stream of batches. Opens it with the daemon at once.

    Terms: a batch is *sent* when `push` returned, *applied* when the daemon has counted it, *durable* when it also
    survives the daemon's death (where the daemon keeps no state, durable means applied). The client keeps every batch
    that is not durable, at most `window` of them, and sends it again after a loss or a restart of the daemon; the
    daemon takes each number once. Resending happens inside `push`, `flush` and `close`: there is no thread.

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
        device_window_bytes: GPU memory for batches of `push_device` that are not durable; taken at its first call.
        on_rejected: called with each `BatchRejected`, from inside `push` or `flush`. None: they are raised there.
        actions_endpoint: where to push, if not where the daemon says (for instance behind port mapping).
        keys: for a daemon with CURVE. None: from ``$COTUNED_CLIENT_KEY`` and ``$COTUNED_SERVER_KEY``, else none.

    Raises:
        DaemonUnreachable: nothing answered within the timeout.
        AuthenticationFailed: the daemon does not take these keys; any later call may raise it too.
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
        device_window_bytes: int = 64 * 2**20,
        on_rejected: Callable[[BatchRejected], None] | None = None,
        actions_endpoint: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.run = run
        self.actor = actor if actor is not None else f"{hostnames.gethostname()[:48]}-{os.getpid()}"
        self.stream = secrets.randbits(63)
        if on_rejected is not None and not callable(on_rejected):
            raise ValueError(f"on_rejected: got {on_rejected!r:.80}, expected something to call with a BatchRejected")
        self._on_rejected = on_rejected
        # All arguments are checked before a socket is opened. index(): Gymnasium's action_space.n is a NumPy integer.
        wanted = None if n_actions is None else index("n_actions", n_actions)
        window, window_bytes = index("window", window), index("window_bytes", window_bytes)
        self._device_window_bytes = index("device_window_bytes", device_window_bytes)
        if not 1 <= window <= MAX_WINDOW or min(window_bytes, self._device_window_bytes) < 1:
            raise ValueError(
                f"window: got {window} batches, {window_bytes} bytes, {self._device_window_bytes} bytes of a GPU; "
                f"expected 1 to {MAX_WINDOW}, 1 or more, 1 or more"
            )
        self._device_window: DeviceWindow | None = None
        hello = Hello(self.actor, self.stream, 0, run, wanted)
        self._connection = Connection(endpoint or default_endpoint(), timeout, keys or keys_from_environment())
        try:
            self._delivery = Delivery(self._connection, hello, window, window_bytes, actions_endpoint)
        except BaseException:
            self._connection.close()
            raise
        self.n_actions = self._delivery.terms.n_actions
        _open_clients.add(self)

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
        with self._connection.exclusive():
            frame = self._encode(executed, proposed, probs, step, phase)
            self._hand_over_rejections()
            if frame is None:
                return self._delivery.last
            return self._delivery.send(frame, self._seconds(timeout))

    def push_device(
        self,
        executed: Any,
        *,
        step: int = 0,
        phase: Literal["train", "prefill"] = "train",
        timeout: float | None = None,
    ) -> int:
        """As `push`, for actions that lie on the daemon's GPU already: they are counted there and never leave it.

        Returns when the actions have been copied into memory that the daemon reads, so the array may be overwritten at
        once; this waits for the work on the current stream (torch's and CuPy's) that makes them. The daemon checks
        their range: an index outside [0, K) comes back as `BatchRejected` of a later call.

        Args:
            executed: action indices, a CuPy array or torch tensor of integers; whatever has DLPack.
            step, phase, timeout: as in `push`.

        Returns:
            The batch's number in this stream (the last one's for an empty batch).

        Raises:
            DeviceNotShared: daemon and actor have no GPU memory in common.
            DeviceUnavailable: there is no CuPy or no GPU.
            DeviceBusy: the work that makes the actions did not end in time; the batch was not sent.
            CapturingStream: the current stream captures a CUDA graph.
            InvalidActions, WindowFull, BatchRejected, StreamLost: as `push`.
        """
        with self._connection.exclusive():
            deadline = time.monotonic() + self._seconds(timeout)
            _, step = self._checked(phase, step)
            window = self._shared_window(executed)
            actions = window.view(executed)
            self._hand_over_rejections()
            if actions.size == 0:
                return self._delivery.last
            begin = self._device_room(window.ring, int(actions.nbytes), deadline)
            window.copy(actions, begin, deadline)
            delivery, n, item_bytes = self._delivery, int(actions.size), int(actions.dtype.itemsize)
            number = delivery.last + 1
            frame = encode_batch(DeviceBatch(self.stream, number, PHASES.index(phase), step, begin, n, item_bytes))
            window.ring.take(number, begin, int(actions.nbytes))
            return delivery.send(frame, max(deadline - time.monotonic(), 0.0))

    def _shared_window(self, executed: Any) -> DeviceWindow:
        device = device_of(executed)
        window = self._device_window
        if window is None:
            window = DeviceWindow(device, self._device_window_bytes, self.n_actions)
            self._delivery.share(window.share(self.stream))
            self._device_window = window
        elif window.device != device:
            raise InvalidActions(f"push_device: got actions on GPU {device}, expected {window.device}, as before")
        return window

    def _device_room(self, ring: Ring, size: int, deadline: float) -> int:
        """Where a batch of this many bytes goes; waits until there is room for it, in the window and in the ring."""
        while True:
            self._delivery.wait_for_room(max(deadline - time.monotonic(), 0.0))
            ring.release(self._delivery.durable)
            begin = ring.find(size)
            if begin is not None:
                return begin
            if time.monotonic() >= deadline:
                raise WindowFull(
                    f"{ring.size} bytes of GPU memory are full of batches that wait to become durable; is the daemon "
                    "running and keeping up? This batch was not sent"
                )
            self._delivery.wait_for_one(min(deadline - time.monotonic(), 0.1))

    def _checked(self, phase: str, step: int) -> tuple[str, int]:
        if phase not in PHASES:
            raise InvalidActions(f'phase: got {phase!r}, expected "train" or "prefill"')
        try:
            step = index("step", step)
        except ValueError as error:
            raise InvalidActions(str(error)) from None
        if not 0 <= step <= MAX_SEQUENCE:
            raise InvalidActions(f"step: got {step}, expected 0 to 2^63 - 1")
        return phase, step

    def _encode(self, executed: Any, proposed: Any, probs: Any, step: int, phase: str) -> bytes | None:
        phase, step = self._checked(phase, step)
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
                self._delivery.last + 1,
                PHASES.index(phase),
                step,
                actions.astype(dtype, copy=False).tobytes(),
                None if before is None else before.astype(dtype, copy=False).tobytes(),
                row_entropy,
            )
        )
        largest = self._delivery.terms.max_frame_bytes
        if len(frame) > largest:
            raise InvalidActions(
                f"executed: got {actions.size} actions, a frame of {len(frame)} bytes; the daemon takes at most "
                f"{largest} bytes (limits.max_frame_bytes). Push smaller batches"
            )
        return frame

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every batch pushed so far is durable: counted, and kept through the daemon's death.

        Raises:
            FlushTimeout: some were not within `timeout` seconds (None: the client's); they are kept and sent again.
            BatchRejected: the daemon rejected one of them (the rest is durable); call again for the next one.
            StreamLost: the daemon lost batches that it had confirmed.
        """
        with self._connection.exclusive():
            self._delivery.flush(self._seconds(timeout))
            self._hand_over_rejections()

    def _seconds(self, timeout: float | None) -> float:
        return self._connection.timeout if timeout is None else check_timeout(timeout)

    def _hand_over_rejections(self) -> None:
        rejections = self._delivery.rejections
        while rejections:
            rejection = rejections.popleft()
            if self._on_rejected is None:
                raise rejection
            self._on_rejected(rejection)

    @property
    def unconfirmed(self) -> int:
        """Batches pushed and not yet known to be durable."""
        return self._delivery.last - self._delivery.durable

    def close(self, timeout: float | None = None) -> None:
        """Flushes, ends the stream and closes the sockets. Closing twice does nothing.

        Raises:
            FlushTimeout, BatchRejected, StreamLost: as `flush`; the sockets are closed all the same.
        """
        if self._connection.closed:
            return
        try:
            self.flush(timeout)
            self._delivery.close(goodbye=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes at once, without a flush: batches that are not durable may be lost."""
        if not self._connection.closed:
            self._delivery.close(goodbye=False)

    def __del__(self) -> None:
        if hasattr(self, "n_actions"):
            self._close_forgotten(min(self._connection.timeout, 1.0))

    def _close_forgotten(self, seconds: float) -> None:
        """Closes a client that its user did not close; says how many batches that lost, if any."""
        if self._connection.closed or self._connection.is_forked:
            return
        lost = ""
        try:
            self.close(seconds)
        except CotunedError as failure:
            lost = f"; {self.unconfirmed} batches may be lost ({failure})"
        warnings.warn(
            f"ActorClient {self.actor!r} was not closed; use it in a with block, or call close(){lost}",
            RuntimeWarning if lost else ResourceWarning,
            stacklevel=2,
            source=self,
        )

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
