"""`cotuned keygen`: certificate files for the daemon and its clients, as zmq.auth and czmq know them.

::

    keys/                         0700
    ├── server.key                public: handed out to every client
    ├── server.key_secret         0600: security.server_key
    ├── clients/                  security.clients
    │   └── actor/NAME.key        public; the folder's name is the key's role
    └── handout/NAME.key_secret   0600: handed out to that client, and not needed here any more
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zmq

from ..wire.errors import ConfigError
from ..wire.protocol import NAME_PATTERN
from .roles import Role

_PUBLIC = "# CURVE public key of {who}, made by `cotuned keygen`; it may be shown to anybody.\n"
_SECRET = "# CURVE secret key of {who}, made by `cotuned keygen`; whoever can read this file is {who}.\n"
_CURVE = 'metadata\ncurve\n    public-key = "{public}"\n'


def make_server(directory: Path) -> list[Path]:
    """Makes the daemon's keys; returns the files, public first.

    Raises:
        ConfigError: one of them is there, or cannot be written; nothing was changed.
    """
    _folder(directory)
    return _make(directory / "server.key", directory / "server.key_secret", "the daemon")


def make_client(directory: Path, name: str, role: Role) -> list[Path]:
    """Makes one client's keys; returns the files, public first. The public one is in force within a second.

    Raises:
        ConfigError: the name cannot be used; or as `make_server`.
    """
    if not NAME_PATTERN.fullmatch(name) or "/" in name:
        raise ConfigError(
            f"name: got {name!r:.80}, expected 1 to 64 of letters, digits, '_', '.', '-', beginning with a letter, a "
            "digit or '_'"
        )
    for other in Role:  # one secret file for each name, so a name has one role
        taken = directory / "clients" / other.value / f"{name}.key"
        if taken.exists():
            raise ConfigError(f"{taken} is there already; nothing is overwritten: choose another name, or remove it")
    clients, handout = directory / "clients" / role.value, directory / "handout"
    for place in (directory, clients.parent, clients, handout):
        _folder(place)
    return _make(clients / f"{name}.key", handout / f"{name}.key_secret", f"{role.value} {name}")


def _folder(path: Path) -> None:
    try:
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True)
            path.chmod(0o700)  # whatever the umask was
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from error


def _make(public_file: Path, secret_file: Path, who: str) -> list[Path]:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    head = _CURVE.format(public=public)
    # The secret first: a public key in force whose secret nobody has would be of no use.
    _write(secret_file, 0o600, _SECRET.format(who=who) + head + f'    secret-key = "{secret}"\n')
    try:
        _write(public_file, 0o644, _PUBLIC.format(who=who) + head)
    except ConfigError:
        secret_file.unlink()
        raise
    return [public_file, secret_file]


def _write(path: Path, mode: int, text: str) -> None:
    """A file that is there as a whole or not at all, since a daemon may be reading the folder; and never over another.

    Not by zmq.auth.create_certificates, which overwrites, and leaves the mode to the umask.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(draft, path)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} is there already; nothing is overwritten: choose another name or --directory, or remove it"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
