"""Why a daemon that listens does not answer: a look at how it takes a fresh connection.

libzmq does not tell a socket's owner that its keys were refused; the messages just wait. After some refusals it never
connects again, so what is looked at is a connection of its own, opened when an answer is overdue: the sockets in use
need no monitor that somebody would have to read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from .keys import Keys

_RETRY_MS = 20
_HANG_UPS = 3
"""So often in a row: a daemon that is being restarted may hang up once."""
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Handshake(Enum):
    """How a daemon takes a connection; the value says so in words."""

    DONE = "the daemon lets us in"
    NOTHING = "nobody shook hands"
    KEY_REFUSED = "the daemon does not know this client's key, or refuses it for this socket"
    NO_KEYS = "the daemon wants keys (CURVE) and this client has none"
    NO_CURVE = "this client has keys and the daemon does not use CURVE (security.server_key is not set)"
    WRONG_SERVER_KEY = "the daemon does not have the key that this client expects of it, or admits nobody at present"


REFUSED = (Handshake.KEY_REFUSED, Handshake.NO_KEYS, Handshake.NO_CURVE, Handshake.WRONG_SERVER_KEY)


def look(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Keys | None, seconds: float) -> Handshake:
    """Connects as a client with these keys would, for at most `seconds`. `Handshake.NOTHING`: nobody shook hands, so
    there is no daemon, or it hangs."""
    deadline = time.monotonic() + seconds
    hang_ups: list[int] = []
    for event, value in _events(context, endpoint, keys, deadline):
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return Handshake.DONE
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return Handshake.KEY_REFUSED
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return Handshake.NO_KEYS if keys is None else Handshake.NO_CURVE
            return Handshake.NOTHING
        hang_ups.append(event)
        if keys is not None and len(hang_ups) == _HANG_UPS:
            break  # hung up on us without a word: a daemon that cannot read what we encrypt, or a proxy before none
    else:
        return Handshake.NOTHING
    match look(context, endpoint, None, deadline - time.monotonic()):
        case Handshake.NO_KEYS:
            return Handshake.WRONG_SERVER_KEY
        case Handshake.DONE:
            return Handshake.NO_CURVE
        case _:
            return Handshake.NOTHING


def _events(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Keys | None, deadline: float
) -> Iterator[tuple[int, int]]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.reconnect_ivl = _RETRY_MS
    socket.ipv6 = True
    set_keys(socket, keys)
    monitor = socket.get_monitor_socket(_WATCHED)
    try:
        socket.connect(endpoint)
        while (left := deadline - time.monotonic()) > 0:
            if monitor.poll(max(1, int(left * 1000))):
                event = parse_monitor_message(monitor.recv_multipart())
                yield int(event["event"]), int(event["value"])
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


def set_keys(socket: zmq.Socket[bytes], keys: Keys | None) -> None:
    """Makes the socket a CURVE client; without keys it stays one in the clear."""
    if keys is not None:
        socket.curve_serverkey = keys.server
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
