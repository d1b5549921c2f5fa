"""Keys for tests, made as `cotuned keygen` makes them, and a bare peer that holds some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from cotuned.service.keygen import make_client, make_server
from cotuned.service.roles import Role
from cotuned.wire import decode_control, encode_control
from cotuned.wire.keys import Keys
from tests.daemon_process import DaemonProcess


class KeyFolder:
    """A daemon's keys, and those of one client of each role, named after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_server(folder)
        for role in Role:
            self.make(role.value, role.value)

    def make(self, name: str, role: str) -> Keys:
        """One more client."""
        make_client(self.folder, name, Role(role))
        return self.of(name)

    def of(self, name: str) -> Keys:
        """A client's keys."""
        return Keys.load(self.folder / "handout" / f"{name}.key_secret", self.folder / "server.key")

    def revoke(self, name: str, role: str) -> None:
        """Takes a client's public key away."""
        (self.folder / "clients" / role / f"{name}.key").unlink()

    @property
    def settings(self) -> dict[str, Any]:
        """The section `security`."""
        return {"server_key": str(self.folder / "server.key_secret")}

    @property
    def stranger(self) -> Keys:
        """Keys that the daemon does not know; its own is right."""
        public, secret = zmq.curve_keypair()
        return Keys(self.of("actor").server, public, secret)

    def environment(self, name: str) -> dict[str, str]:
        """Variables that make a client of this name."""
        return {
            "COTUNED_CLIENT_KEY": str(self.folder / "handout" / f"{name}.key_secret"),
            "COTUNED_SERVER_KEY": str(self.folder / "server.key"),
        }


@contextmanager
def peer(kind: int, endpoint: str, keys: Keys | None) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket in a context of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.server, keys.public, keys.secret
    try:
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(0)
        context.term()


def ask(daemon: DaemonProcess, keys: Keys | None, op: str, **fields: Any) -> dict[str, Any]:
    """The daemon's whole answer to one request over a connection of its own."""
    with peer(zmq.DEALER, daemon.endpoint, keys) as socket:
        return ask_on(socket, op, **fields)


def ask_on(socket: zmq.Socket[bytes], op: str, **fields: Any) -> dict[str, Any]:
    """The daemon's whole answer to one request."""
    socket.send(encode_control({"id": 1, "op": op, **fields}))
    assert socket.poll(5000), f"no answer to {op}"
    return decode_control(socket.recv())


StartDaemon = Callable[..., DaemonProcess]
