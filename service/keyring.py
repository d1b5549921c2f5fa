"""The keys that may connect, by role: a folder that is looked at again while the daemon runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ..wire.errors import ConfigError
from ..wire.keys import read_public
from .logs import log
from .roles import Role

LOOK_INTERVAL = 1.0
"""Seconds between two looks at the folder, at least."""
_WRITABLE_BY_ALL = 0o002

_Print = tuple[tuple[str, int, int, int], ...]


class Keyring:
    """Roles by public key, as the files say. Any thread may ask.

    Nothing is kept from an earlier look: what cannot be read now is refused now. (pyzmq's own `configure_curve` keeps
    all keys that it had when one file cannot be read, the revoked ones too.) A file that cannot be read, or a key that
    lies in two roles' folders, is refused alone; a folder that cannot be read refuses all of its role.

    Args:
        folder: has folders ``actor``, ``learner`` and ``observer``, each with ``NAME.key`` files; one that is not there
            is empty.

    Raises:
        ConfigError: the folder is not there, or anybody may write to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for place in (folder, *(folder / role.value for role in Role)):
            _check_folder(place, missing_ok=place is not folder)
        self._lock = threading.Lock()
        self._looked_at = -LOOK_INTERVAL
        self._seen: _Print | None = None
        self._roles: Mapping[bytes, Role] = {}
        self._faults: tuple[str, ...] = ()
        self.observers: frozenset[bytes] = frozenset()
        """Keys of observers as of the last look."""
        self.trouble = ""
        """Why a whole folder cannot be read; empty: all can."""
        self.look()

    def role(self, key: bytes) -> Role | None:
        """The role of a public key (Z85); None: it has none, or has it no more."""
        self.look()
        return self._roles.get(key)

    def look(self) -> None:
        """Reads the folder again if it changed, and if the last look is `LOOK_INTERVAL` ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < LOOK_INTERVAL:
                return
            self._looked_at = now
            seen, trouble = self._fingerprint()
            if (
                seen != self._seen or trouble != self.trouble or self._faults
            ):  # what failed for want of memory or files is tried again
                self._read(seen, trouble)

    def _fingerprint(self) -> tuple[_Print, str]:
        found: list[tuple[str, int, int, int]] = []
        trouble: list[str] = []
        try:
            os.stat(self._folder)
        except OSError as error:
            return (), f"cannot read the clients' keys in {self._folder} ({error.strerror}); nobody is let in"
        for role in Role:
            try:
                with os.scandir(self._folder / role.value) as entries:
                    names = [entry.path for entry in entries if entry.name.endswith(".key")]
            except FileNotFoundError:
                continue  # a role that nobody has
            except OSError as error:
                trouble.append(
                    f"cannot read the {role.value}s' keys in {self._folder / role.value} ({error.strerror}); no "
                    f"{role.value} is let in"
                )
                continue
            found += [self._stat(name) for name in names]
        return tuple(sorted(found)), "; ".join(trouble)

    def _stat(self, path: str) -> tuple[str, int, int, int]:
        try:
            # ctime and not mtime: a file put there by `mv` or `cp -p`, or one that is made readable, has an old mtime.
            state = os.stat(path)
            return path, state.st_ino, state.st_ctime_ns, state.st_size
        except OSError:
            return path, 0, 0, 0

    def _read(self, seen: _Print, trouble: str) -> None:
        roles: dict[bytes, Role] = {}
        faults: list[str] = [trouble] if trouble else []
        twice: set[bytes] = set()
        for path, *_ in seen:
            try:
                key, role = read_public(path), Role(Path(path).parent.name)
            except ConfigError as error:
                faults.append(str(error))
                continue
            if roles.setdefault(key, role) is not role:
                twice.add(key)
                faults.append(f"{path}: the same key lies in the folder of another role; it gets none of them")
        for key in twice:
            del roles[key]
        if tuple(faults) != self._faults:
            for fault in faults:
                log(logging.ERROR, "client key refused", why=fault)
        if roles != self._roles:
            log(logging.INFO, "client keys read", folder=str(self._folder), keys=len(roles), before=len(self._roles))
        self._seen, self._roles, self._faults, self.trouble = seen, roles, tuple(faults), trouble
        self.observers = frozenset(key for key, role in roles.items() if role is Role.OBSERVER)


def _check_folder(folder: Path, missing_ok: bool) -> None:
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        if missing_ok:
            return
        raise ConfigError(
            f"security.clients: there is no folder {folder}; `cotuned keygen NAME --role actor` makes it, with a key"
        ) from None
    except OSError as error:
        raise ConfigError(f"security.clients: cannot read {folder}: {error.strerror}") from error
    if not folder.is_dir():
        raise ConfigError(f"security.clients: {folder} is not a folder")
    if mode & _WRITABLE_BY_ALL:
        raise ConfigError(f"security.clients: anybody may put a key into {folder}; chmod o-w {folder}")
