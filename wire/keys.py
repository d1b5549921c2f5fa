"""CURVE keys of a client, and the certificate files that hold keys (zmq.auth's format, which czmq reads too)."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from .errors import ConfigError

CLIENT_KEY_VARIABLE = "COTUNED_CLIENT_KEY"
"""Environment variable that names a client's secret file."""
SERVER_KEY_VARIABLE = "COTUNED_SERVER_KEY"
"""Environment variable that names the file with the daemon's public key."""

_Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
_KEY_CHARACTERS = 40
_LARGEST_FILE = 64 * 1024
_TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO
_File = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Keys:
    """What a client proves itself by, and the daemon that it expects; each key as 40 characters of Z85."""

    server: bytes
    """The daemon's public key."""
    public: bytes
    """The client's own."""
    secret: bytes = field(repr=False)  # so that no traceback and no log shows it

    def __post_init__(self) -> None:
        for name, key in (("server", self.server), ("public", self.public), ("secret", self.secret)):
            if not is_key(key):
                raise ConfigError(f"keys: {name} is not a CURVE key; expected {_KEY_CHARACTERS} characters of Z85")
        _check_pair("keys", self.public, self.secret)

    @classmethod
    def load(cls, client_secret_file: _File, server_public_file: _File) -> Keys:
        """Keys from the files that ``cotuned keygen`` made.

        Args:
            client_secret_file: ``NAME.key_secret``, handed out to this client.
            server_public_file: ``server.key``.

        Raises:
            ConfigError: a file is missing or holds no key, or others may read the secret.
        """
        public, secret = read_secret(client_secret_file)
        return cls(read_public(server_public_file), public, secret)


def keys_from_environment() -> Keys | None:
    """The keys that ``COTUNED_CLIENT_KEY`` and ``COTUNED_SERVER_KEY`` name; None if neither is set.

    Raises:
        ConfigError: only one is set, or as `Keys.load`.
    """
    client, server = os.environ.get(CLIENT_KEY_VARIABLE), os.environ.get(SERVER_KEY_VARIABLE)
    if not client and not server:
        return None
    if not client or not server:
        missing = SERVER_KEY_VARIABLE if client else CLIENT_KEY_VARIABLE
        raise ConfigError(
            f"{missing} is not set; set both: {CLIENT_KEY_VARIABLE} to the client's .key_secret file and "
            f"{SERVER_KEY_VARIABLE} to the daemon's server.key, or neither"
        )
    return Keys.load(client, server)


def is_key(key: bytes) -> bool:
    """Whether this can be a key: 40 characters of Z85."""
    return len(key) == _KEY_CHARACTERS and _Z85.issuperset(key)


def read_public(file: _File) -> bytes:
    """The public key in a certificate file.

    Raises:
        ConfigError: there is no such file, or no key in it.
    """
    return _read(file)["public-key"]


def read_secret(file: _File) -> tuple[bytes, bytes]:
    """Public and secret key in a secret certificate file.

    Raises:
        ConfigError: there is no such file, no pair of keys in it, or others than its owner (and those of its group)
            may read it.
    """
    path = Path(file)
    keys = _read(path)
    if "secret-key" not in keys:
        raise ConfigError(f"{path} holds a public key only, expected the file {path.stem}.key_secret beside it")
    mode = path.stat().st_mode
    # Reading by the group is let pass: Kubernetes hands a secret to a user who is not root in no other way.
    if mode & _TOO_OPEN:
        raise ConfigError(
            f"{path}: others may use this secret (mode {stat.S_IMODE(mode):04o}, expected 0600); chmod 600 {path}, "
            "and make new keys if somebody else may have read it"
        )
    _check_pair(str(path), keys["public-key"], keys["secret-key"])
    return keys["public-key"], keys["secret-key"]


def _read(file: _File) -> dict[str, bytes]:
    path = Path(file)
    try:
        # Not to be held up by a pipe of that name, which would hold up the daemon's loop too.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            content = stream.read(_LARGEST_FILE)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}; `cotuned keygen` makes one") from error
    # Not by zmq.auth.load_certificate: it takes whatever stands behind "public-key =" for a key.
    keys: dict[str, bytes] = {}
    for line in content.splitlines():
        name, separator, value = line.partition(b"=")
        if separator and name.strip() in (b"public-key", b"secret-key"):
            keys[name.strip().decode()] = value.strip().strip(b"\"'")
    if "public-key" not in keys or not all(is_key(key) for key in keys.values()):
        raise ConfigError(f"{path} is not a key file, expected one that `cotuned keygen` made (zmq.auth's format)")
    return keys


def _check_pair(where: str, public: bytes, secret: bytes) -> None:
    try:
        fits = zmq.curve_public(secret) == public
    except zmq.ZMQError:
        fits = False
    if not fits:
        raise ConfigError(f"{where}: public and secret key do not belong together; `cotuned keygen` makes a pair")
