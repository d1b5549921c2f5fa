"""The folder that holds ``state.db``: made, locked against a second daemon, and what is set aside in it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ..wire.errors import ConfigError, StateInUse

FILE = "state.db"
LOCK = "lock"


class StateDirectory:
    """An open, locked state directory.

    Args:
        directory: as the settings say; relative to the working directory.
        create: whether to make it (for this user only) if it is not there.

    Raises:
        ConfigError: it cannot be made, or nothing can be written in it.
        StateInUse: another daemon or command has it.
    """

    def __init__(self, directory: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(directory).absolute()
        self.file = self.path / FILE
        if not create and not self.path.is_dir():
            raise ConfigError(f"state.directory: there is no folder {self.path}; no daemon has kept state there")
        try:
            if create:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"state.directory: cannot write in {self.path}: {error.strerror}; name a folder that this user can "
                'write in, or "" to keep nothing'
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StateInUse(
                f"{self.path} is in use by process {holder}, a daemon or a `cotuned state` command; stop it, or give "
                "this daemon a state.directory of its own"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def set_aside(self, why: str) -> Path:
        """Renames the state file, and what SQLite keeps beside it, to ``state.db.WHY-TIME``; returns the new name."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        target, number = self.path / f"{FILE}.{why}-{stamp}", 1
        while target.exists():
            number += 1
            target = self.path / f"{FILE}.{why}-{stamp}-{number}"
        for end in ("-wal", "-shm", ""):  # the file itself last: until then another try finds all of it
            beside = self.path / f"{FILE}{end}"
            if beside.exists():
                beside.rename(f"{target}{end}")
        return target

    def close(self) -> None:
        """Gives the lock back. The lock file stays: removing it would let two daemons lock two files of one name."""
        os.close(self._lock)
