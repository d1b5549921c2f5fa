"""Who may come in, and ask what: CURVE on the sockets, ZAP behind it, a role for every request."""

from __future__ import annotations

import logging
import time
from typing import cast

import zmq
from zmq.auth.base import Authenticator
from zmq.auth.thread import ThreadAuthenticator

from ..config.security_settings import SecuritySettings
from ..wire.errors import ConfigError, Forbidden
from ..wire.keys import read_secret
from ..wire.messages import Acknowledge, Goodbye, Hello, Request, Share
from .keyring import Keyring
from .logs import log
from .roles import MAY_ASK, MAY_CONNECT, Role
from .streams import Streams

NOBODY = ""
"""Sender of what came with a key that may not send it; owns no stream."""
_END_MS = 1_000
"""How long the authenticator may take to hear that it shall end; milliseconds."""
_REFUSAL_LOG_INTERVAL = 1.0
"""Seconds between two log lines about refused peers: whoever knocks must not fill the disk."""

Socket = zmq.Socket[bytes]


class Gatekeeper:
    """See the module. `protect`, `sender…`, `admit` and `look` belong to the engine's thread.

    Args:
        settings: with a `server_key`.

    Raises:
        ConfigError: a key file or the folder of clients' keys cannot be used.
    """

    def __init__(self, settings: SecuritySettings) -> None:
        assert settings.server_key is not None
        try:
            self._public, self._secret = read_secret(settings.server_key)
        except ConfigError as error:
            raise ConfigError(f"security.server_key: {error}") from error
        self.keyring = Keyring(settings.clients_folder)
        self._authenticator: ThreadAuthenticator | None = None
        self._watchers = self.keyring.observers
        self.troubles: tuple[str, ...] = ()
        """Why the daemon is not ready, a sentence each."""

    def start(self, context: zmq.Context[Socket]) -> None:
        """Starts ZAP in this context, before any socket is bound in it: without ZAP, CURVE takes every key."""
        authenticator = ThreadAuthenticator(context, log=logging.getLogger("cotuned.zap"))
        credentials = _Credentials(self.keyring)
        for domain in MAY_CONNECT:
            authenticator.configure_curve_callback(domain, credentials)
        authenticator.start()
        cast(Socket, authenticator.pipe).sndtimeo = _END_MS  # pyright: ignore[reportUnknownMemberType]
        self._authenticator = authenticator

    def protect(self, socket: Socket, name: str) -> None:
        """Makes a socket a CURVE server whose peers ZAP must have let in; `name` is one of `MAY_CONNECT`."""
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.curve_server = True
        socket.zap_domain = name.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no ZAP, no peers: not even when its thread has died

    def look(self) -> bool:
        """Once a turn: looks at the keys and at ZAP's thread; whether a watcher's key was taken away."""
        self.keyring.look()
        authenticator = self._authenticator
        if authenticator is not None and not authenticator.is_alive():
            self._authenticator = None
            _bury(authenticator)
            log(logging.ERROR, "authenticator died", why="no new peer is let in; restart the daemon")
        dead = () if self._authenticator else ("the thread that checks keys has died, so no new peer is let in",)
        self.troubles = (*dead, *filter(None, (self.keyring.trouble,)))
        watchers, before = self.keyring.observers, self._watchers
        self._watchers = watchers
        return bool(before - watchers)

    def sender(self, frame: zmq.Frame) -> str:
        """The public key of the connection that a frame came by."""
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:  # pragma: no cover - CURVE with ZAP always names one
            return NOBODY

    def sender_of_batch(self, frame: zmq.Frame) -> str:
        """As `sender`, and `NOBODY` if the key is no actor's (any more)."""
        sender = self.sender(frame)
        return sender if self.keyring.role(sender.encode()) is Role.ACTOR else NOBODY

    def admit(self, sender: str | None, request: Request, streams: Streams) -> None:
        """Returns if the sender may ask this.

        A stream that no key owns (taken over from a state that did not hold its owner) belongs to the first actor that
        knows its number, which is random and never shown.

        Raises:
            Forbidden: the role that it has, and the role that this needs.
        """
        role = self.keyring.role((sender or NOBODY).encode())
        if role is None or type(request) not in MAY_ASK[role]:
            needed = " or ".join(its.value for its in Role if type(request) in MAY_ASK[its])
            has = "has no role (any more)" if role is None else f"has the role {role.value}"
            raise Forbidden(
                f"{request.op}: the key of this connection {has}, expected {needed}; use a key of that role "
                f"(cotuned keygen NAME --role {needed.split()[0]})"
            )
        if isinstance(request, Hello | Acknowledge | Goodbye | Share):
            stream = streams.get(request.stream)
            if stream is not None and stream.owner is None:
                stream.owner = sender
            if stream is not None and stream.owner != sender:
                raise Forbidden(
                    f"{request.op}: the stream was opened with another key, expected one that this key has opened; "
                    "open a client of your own"
                )

    def close(self) -> None:
        """Ends ZAP; the context's sockets are closed before."""
        if self._authenticator is not None:
            try:
                self._authenticator.stop()
            except zmq.Again:  # its thread has died, and nobody heard it
                _bury(self._authenticator)
            self._authenticator = None


def _bury(authenticator: ThreadAuthenticator) -> None:
    """What `stop` does where the thread lives. Where it has died, `stop` would wait for it for ever."""
    pipe = cast(Socket, authenticator.pipe)  # pyright: ignore[reportUnknownMemberType] - pyzmq's is bare
    pipe.close(0)
    authenticator.pipe = None  # pyright: ignore[reportAttributeAccessIssue] - so that its __del__ does not wait either
    Authenticator.stop(authenticator)  # closes ZAP's address, so libzmq refuses at once what nobody would answer


class _Credentials:
    """Asked by the authenticator, in its thread, for every new connection."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._refused = 0
        self._logged_at = -_REFUSAL_LOG_INTERVAL

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key may connect to this socket."""
        role = self._keyring.role(key)
        if role in MAY_CONNECT[domain]:
            return True
        self._refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _REFUSAL_LOG_INTERVAL:
            self._logged_at = now
            has = "unknown" if role is None else role.value
            log(logging.WARNING, "peer refused", socket=domain, key=key.decode(), role=has, refused=self._refused)
        return False
