"""The asking side of the control channel (DEALER): one request, one answer, always a deadline. Used by the clients and
by the command line."""

from __future__ import annotations

import math
import numbers
import os
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, TypeVar, cast

import zmq

from .answers import answer_from_map
from .codec import decode_control, encode_control
from .errors import (
    AuthenticationFailed,
    ClientClosed,
    ClientInUse,
    CotunedError,
    DaemonUnreachable,
    FrameError,
    refusal,
)
from .handshake import REFUSED, Handshake, look, set_keys
from .keys import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE, Keys
from .messages import Request
from .protocol import ENDPOINT_VARIABLE

A = TypeVar("A")

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5584"
LONGEST_TIMEOUT = 1e6
"""Seconds; eleven days, and what fits ZeroMQ's milliseconds."""
ASK_AGAIN_SECONDS = 1.0
LOOK_SECONDS = 0.5
"""An answer that is overdue for so long, or for half of the timeout, is reason to look why; and the longest look."""
HEARTBEAT_MS = 2_000
"""A peer that vanished without closing its connection is noticed after two of these; milliseconds."""


def default_endpoint() -> str:
    """The queries endpoint that `ENDPOINT_VARIABLE` names, else the daemon's default on this machine."""
    return os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def check_timeout(timeout: Any) -> float:
    """Seconds above 0, at most `LONGEST_TIMEOUT`; every wait has an end. Raises ValueError for anything else."""
    number: float = float(timeout) if isinstance(timeout, numbers.Real) and timeout is not True else math.nan
    if not 0 < number <= LONGEST_TIMEOUT:
        raise ValueError(f"timeout: got {timeout!r:.40}, expected seconds, above 0 and at most {LONGEST_TIMEOUT:g}")
    return number


def set_common_options(socket: zmq.Socket[bytes]) -> None:
    """Options of every client socket: heartbeats, quick reconnects, and no waiting at close."""
    socket.linger = 0
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = 2 * HEARTBEAT_MS
    socket.handshake_ivl = 5_000
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1_000
    socket.ipv6 = True


class Connection:
    """A DEALER socket with requests numbered, so an answer that comes too late is dropped, not mistaken.

    Args:
        endpoint: the daemon's queries endpoint, e.g. ``tcp://127.0.0.1:5584`` or ``ipc:///run/cotuned/queries``.
        timeout: seconds that a request may take, unless it says otherwise.
        keys: for a daemon with CURVE; None: in the clear.
    """

    def __init__(self, endpoint: str, timeout: float, keys: Keys | None = None) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self.timeout = check_timeout(timeout)
        self._pid = os.getpid()
        self._next_id = 0
        self.generation: int | None = None
        """Which life of the daemon the last answer came from: a random number. None: nothing came yet."""
        self._user: dict[str, int] = {}  # the thread that is in a call; setdefault is atomic
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._connected: dict[zmq.Socket[bytes], str] = {}
        self._socket = self.open_socket(zmq.DEALER)
        self.connect(self._socket, endpoint)

    def open_socket(self, kind: int) -> zmq.Socket[bytes]:
        """One more socket in this connection's context; `close` closes it."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        set_common_options(socket)
        set_keys(socket, self._keys)
        return socket

    def connect(self, socket: zmq.Socket[bytes], endpoint: Any) -> None:
        """Connects a socket of this connection; closes the connection if the endpoint is none.

        Raises:
            CotunedError: ZeroMQ cannot connect to such an endpoint. (A daemon that is not there shows only later.)
        """
        try:
            if endpoint.startswith("tcp://") and not 0 < int(endpoint.rpartition(":")[2]) < 65536:
                raise ValueError("the port is not 1 to 65535")
            socket.connect(endpoint)
            self._connected[socket] = endpoint
        except (zmq.ZMQError, TypeError, ValueError, AttributeError) as error:
            self.close()
            raise CotunedError(
                f"endpoint: got {endpoint!r}, which ZeroMQ cannot connect to ({error}); "
                f"expected something like {DEFAULT_ENDPOINT!r} or 'ipc:///run/cotuned/queries'"
            ) from error

    @contextmanager
    def exclusive(self) -> Generator[None, None, None]:
        """For one call: raises if the client is closed, forked, or in a call of another thread. Sockets and windows are
        not made for that."""
        self.check_usable()
        # Not a lock: a Ctrl-C between its acquisition and `try` would leave it locked for ever. What an interrupted
        # call leaves here is its own thread, which may come in again.
        me = threading.get_ident()
        if self._user.setdefault("thread", me) != me:
            raise ClientInUse("this client is in a call of another thread; open one client in each thread")
        try:
            yield
        finally:
            self._user.pop("thread", None)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that opened it."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raises ClientClosed if closed or forked: ZeroMQ sockets are not fork-safe."""
        if self._socket.closed:
            raise ClientClosed("this client is closed; open a new one")
        if os.getpid() != self._pid:
            raise ClientClosed(
                f"this client was opened in process {self._pid} and is used in {os.getpid()}; "
                "open one client in each process, after the fork"
            )

    def send(self, request: Request, again: int | None = None) -> int:
        """Sends a request without waiting; returns its id for `receive`. `again`: the id under which it was sent."""
        self.check_usable()
        if again is None:
            self._next_id += 1
        request_id = self._next_id if again is None else again
        message = {"op": request.op, **{field.name: getattr(request, field.name) for field in fields(request)}}
        try:
            self._socket.send(encode_control({"id": request_id, **message}), zmq.DONTWAIT)
        except zmq.Again as error:
            raise self._unreachable(self.timeout) from error
        return request_id

    def receive(self, request_id: int, seconds: float) -> dict[str, Any] | None:
        """The answer to request `request_id`, or None if it does not come within `seconds` (0: look, do not wait).

        Raises:
            RequestRefused: the daemon answered with an error.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                message = decode_control(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._socket.poll(max(1, math.ceil(left * 1000)))
                continue
            if message.get("id") != request_id and message.get("id") is not None:
                continue  # the answer to a request that was given up
            self.generation = message.get("generation")
            if "error" in message:
                error = cast("dict[str, Any]", message["error"])
                raise refusal(str(error.get("code")), str(error.get("message")))
            answer = message.get("answer")
            if not isinstance(answer, dict):
                raise FrameError(f"got an answer without a map {list(message)}; is {self.endpoint} a cotuned daemon?")
            return cast("dict[str, Any]", answer)

    def ask(self, request: Request, answer: type[A], timeout: float | None = None) -> A:
        """Sends a request and waits for its answer.

        Raises:
            AuthenticationFailed: the daemon does not shake hands with these keys, or without any.
            DaemonUnreachable: no answer within the timeout. The request may still reach the daemon later.
            RequestRefused: the daemon answered with an error; its subclass says which.
        """
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        with self.exclusive():
            return self.ask_inside(request, answer, seconds)

    def ask_inside(self, request: Request, answer: type[A], seconds: float) -> A:
        """As `ask`, for a caller that is within `exclusive`.

        A request that is under way is lost with a daemon that dies, so it is sent again each second, under the same
        number: every request may be served twice (a `cotune` step is answered once), and a second answer is dropped.
        """
        deadline = time.monotonic() + seconds
        request_id = self._send_or_reconnect(request, None, seconds)
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(request_id, min(left / 2, LOOK_SECONDS))
            if message is None:
                begun = time.monotonic()
                self.check_admitted(min(deadline - begun, LOOK_SECONDS))
                rest = ASK_AGAIN_SECONDS - LOOK_SECONDS - (time.monotonic() - begun)
                message = self.receive(request_id, min(deadline - time.monotonic(), rest))
            if message is not None:
                return answer_from_map(answer, message)
            self._send_or_reconnect(request, request_id, max(deadline - time.monotonic(), 0.0))
        raise self._unreachable(seconds)

    def _send_or_reconnect(self, request: Request, again: int | None, seconds: float) -> int:
        try:
            return self.send(request, again)
        except DaemonUnreachable:
            if not self.check_admitted(min(seconds, LOOK_SECONDS)):
                raise
            self.reconnect_all()
            return self.send(request, again)

    def reconnect_all(self) -> None:
        """`reconnect` for every socket of this connection."""
        for socket in self._connected:
            self.reconnect(socket)

    def reconnect(self, socket: zmq.Socket[bytes]) -> None:
        """Connects anew, and drops what waits to be sent: libzmq never tries again once a daemon has refused it."""
        with suppress(zmq.ZMQError):  # the refused connection is gone already
            socket.disconnect(self._connected[socket])
        socket.connect(self._connected[socket])

    def check_admitted(self, seconds: float) -> bool:
        """For a caller whose answer is overdue: looks for at most `seconds` whether the daemon refuses us. True: it
        lets us in. False: it is not there, or hangs.

        Raises:
            AuthenticationFailed: it refuses us.
        """
        found = look(self._context, self.endpoint, self._keys, seconds)
        if found in REFUSED:
            raise AuthenticationFailed(
                f"{self.endpoint}: {found.value}. Pass keys=Keys.load(client's .key_secret, daemon's server.key), or "
                f"set ${CLIENT_KEY_VARIABLE} and ${SERVER_KEY_VARIABLE}; `cotuned keygen` makes keys, and the daemon "
                "takes those in security.clients"
            )
        return found is Handshake.DONE

    def _unreachable(self, seconds: float) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"nothing answered at {self.endpoint} within {seconds:g} s; is `cotuned serve` running, "
            "and is this its queries endpoint (port 5584 unless configured)?"
        )

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket and its context; requests not yet sent get `linger_ms` milliseconds. Closing twice, or in a
        forked child, does nothing."""
        if os.getpid() == self._pid and not self._context.closed:
            # One by one: when the collector takes a cycle the context has forgotten them, and would wait for ever.
            for socket in self._sockets:
                socket.close(linger_ms)
            self._context.term()

    def __del__(self) -> None:
        # A context that is collected with open sockets waits for them for ever (libzmq's zmq_ctx_term).
        if hasattr(self, "_socket") and not self._context.closed and os.getpid() == self._pid:
            warnings.warn(f"a client of {self.endpoint} was not closed", ResourceWarning, source=self, stacklevel=2)
            self.close()
