"""The daemon's sockets: bound, bounded, and with an end to every wait."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from typing import IO, cast

import zmq

from ..config.settings import Settings
from ..wire.codec import MAX_CONTROL_BYTES
from ..wire.connection import HEARTBEAT_MS
from ..wire.errors import EndpointInUse
from .gatekeeper import Gatekeeper
from .logs import log

_HANDSHAKE_MS = 5_000
Socket = zmq.Socket[bytes]


class Sockets:
    """PULL for batches, ROUTER for queries, PUB for watchers.

    Args:
        settings: endpoints and limits.
        guard: makes them CURVE servers and says who sends; None: in the clear.

    Raises:
        EndpointInUse: an endpoint cannot be bound; those bound before are given back.
    """

    def __init__(self, settings: Settings, guard: Gatekeeper | None = None) -> None:
        self.guard = guard
        self.sender: str | None = None
        """Public key behind the frame that `requests` yielded last; None without CURVE."""
        self._rebind_watch = False
        limits, endpoints = settings.limits, settings.endpoints
        self._context: zmq.Context[Socket] = zmq.Context()
        self._locks: list[IO[str]] = []
        try:
            if guard is not None:
                guard.start(self._context)
            self.actions = self._socket("actions", zmq.PULL, limits.max_frame_bytes, limits.backlog_batches)
            self.queries = self._socket("queries", zmq.ROUTER, MAX_CONTROL_BYTES, 1000)
            self.queries.router_mandatory = True  # so that an answer to nobody is seen, not dropped in silence
            self.watch = self._socket("watch", zmq.PUB, MAX_CONTROL_BYTES, 1000)
            self.endpoints = {
                "actions": self._bind(self.actions, endpoints.actions),
                "queries": self._bind(self.queries, endpoints.queries),
                "watch": self._bind(self.watch, endpoints.watch),
            }
        except BaseException:
            self.close(0)
            raise
        self._wake = -1
        self._poller = zmq.Poller()
        self._poller.register(self.actions, zmq.POLLIN)
        self._poller.register(self.queries, zmq.POLLIN)

    def _socket(self, name: str, kind: int, max_bytes: int, high_water_mark: int) -> Socket:
        socket = self._context.socket(kind)
        socket.maxmsgsize = max_bytes
        socket.hwm = high_water_mark
        socket.linger = 0
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = 2 * HEARTBEAT_MS
        socket.heartbeat_ttl = 3 * HEARTBEAT_MS
        if self.guard is not None:
            self.guard.protect(socket, name)
        return socket

    def _bind(self, socket: Socket, endpoint: str) -> str:
        if endpoint.startswith("ipc://"):
            self._lock(endpoint.removeprefix("ipc://"))
        socket.ipv6 = "[" in endpoint
        try:
            self._bind_private(socket, endpoint)
        except zmq.ZMQError as error:
            raise EndpointInUse(
                f"cannot bind {endpoint}: {error.strerror}; if something listens there, stop it, or use port 0 for any "
                "free one; if the address is not this machine's, choose one that is"
            ) from error
        return cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    @staticmethod
    def _bind_private(socket: Socket, endpoint: str) -> None:
        umask = os.umask(0o077)  # an ipc socket is for this user only, whatever the umask was
        try:
            socket.bind(endpoint)
        finally:
            os.umask(umask)

    def _lock(self, path: str) -> None:
        """ZeroMQ lets a second daemon steal an ipc path without a word; a lock file does not."""
        try:
            # For this user only, whatever the umask: others could hold it. Not through a link: they could have laid it.
            number = os.open(path + ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            lock = os.fdopen(number, "w")  # held for the daemon's life
            os.fchmod(number, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EndpointInUse(
                f"cannot bind ipc://{path}: {error.strerror} ({path}.lock); is another daemon running there, "
                "and does the folder exist?"
            ) from error
        self._locks.append(lock)
        mode = os.stat(os.path.dirname(path)).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # as Kubernetes makes an emptyDir: said, not refused
            why = "anybody who can enter this folder can replace the socket; make it 0700"
            log(logging.WARNING, "ipc folder open", folder=os.path.dirname(path), why=why)

    def look(self) -> None:
        """Once a turn: has the guard look at the keys, and hangs up on all watchers if the key of one was taken away.

        The others connect again by themselves, and are asked for their keys. PUB has no way to hang up on one.
        """
        if self.guard is None:
            return
        if self.guard.look():
            with contextlib.suppress(zmq.ZMQError):
                self.watch.unbind(self.endpoints["watch"])
            self._rebind_watch = True
        if self._rebind_watch:
            try:
                self._bind_private(self.watch, self.endpoints["watch"])
                self._rebind_watch = False
            except zmq.ZMQError as error:  # until libzmq has closed the old one; the next turn tries again
                log(logging.DEBUG, "watch not bound yet", error=error.strerror)

    def wake_on(self, descriptor: int) -> None:
        """From now on `wait` returns, too, when this eventfd is written to."""
        self._wake = descriptor
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns when something can be received, or after `seconds`."""
        for ready, _ in self._poller.poll(max(0, int(seconds * 1000))):
            if ready == self._wake:
                os.eventfd_read(self._wake)

    def batches(self, most: int, most_bytes: int) -> tuple[list[bytes], list[str | None]]:
        """Frames of batches that have arrived, all or as many as a limit allows, and the public key behind each (None
        without CURVE). Does not wait."""
        if self.guard is not None:
            return self._batches_from(self.guard, most, most_bytes)
        frames: list[bytes] = []
        size, receive = 0, self.actions.recv
        with contextlib.suppress(zmq.Again):
            while len(frames) < most and size < most_bytes:
                frame = receive(zmq.DONTWAIT)
                frames.append(frame)
                size += len(frame)
        return frames, [None] * len(frames)

    def _batches_from(self, guard: Gatekeeper, most: int, most_bytes: int) -> tuple[list[bytes], list[str | None]]:
        frames: list[bytes] = []
        senders: list[str | None] = []
        size = 0
        with contextlib.suppress(zmq.Again):
            while len(frames) < most and size < most_bytes:
                frame = self.actions.recv(zmq.DONTWAIT, copy=False)  # only a Frame tells who sent it, and is slower
                senders.append(guard.sender_of_batch(frame))
                frames.append(frame.bytes)
                size += len(frame)
        return frames, senders

    def requests(self, most: int) -> Iterator[tuple[bytes, bytes]]:
        """(asker, frame) of control messages that have arrived; ends like `batches`. Does not wait."""
        with contextlib.suppress(zmq.Again):
            for _ in range(most):
                if self.guard is None:
                    asker, *frames = self.queries.recv_multipart(zmq.DONTWAIT)
                    yield asker, frames[-1] if frames else b""
                else:
                    first, *rest = self.queries.recv_multipart(zmq.DONTWAIT, copy=False)
                    self.sender = self.guard.sender(rest[-1] if rest else first)
                    yield first.bytes, rest[-1].bytes if rest else b""

    def answer(self, asker: bytes, frame: bytes) -> bool:
        """Sends an answer; False if the asker is gone or does not read."""
        try:
            self.queries.send_multipart([asker, frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def publish(self, topic: bytes, frame: bytes) -> None:
        """Sends to whoever watches; one that does not read misses messages, by the nature of PUB."""
        self.watch.send_multipart([topic, frame], zmq.DONTWAIT)

    def close(self, linger_ms: int = 500) -> None:
        """Closes all sockets; answers under way get `linger_ms` milliseconds."""
        for name in ("actions", "queries", "watch"):
            socket: Socket | None = getattr(self, name, None)
            if socket is not None:
                socket.close(linger_ms)
        if self.guard is not None:
            self.guard.close()
        self._context.term()
        for lock in self._locks:
            lock.close()
