"""`Writer`: the thread that owns the state file, so that the engine never waits for the disk."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from queue import SimpleQueue

from .logs import log
from .snapshot import Snapshot
from .store import StateStore

_REMINDER_SECONDS = 10.0
"""Seconds between log lines while the disk goes on failing."""


class Writer:
    """Commits one snapshot at a time. What it has to say, it says through `wake`: a file descriptor to wait for.

    A snapshot that the disk does not take is tried again, each `interval`, until it does or `close` is called.

    Args:
        store: belongs to the writer's thread from now on, which also closes it.
        interval: seconds between two tries.
    """

    def __init__(self, store: StateStore, interval: float) -> None:
        self._store = store
        self._interval = interval
        self._waiting: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._committed = 0
        self._crash: BaseException | None = None
        self.failure: str | None = None
        """Why the last try failed; None: it did not."""
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a snapshot is committed, or the writer's thread has died."""
        self._stop = threading.Event()
        # A disk that hangs for ever must not keep the process from ending: close() has a timeout.
        self._thread = threading.Thread(target=self._run, name="state writer", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """The state file."""
        return str(self._store.path)

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a snapshot; the one before must be committed."""
        self._waiting.put(snapshot)

    def committed(self) -> int:
        """Number of the last snapshot that is on disk; 0: none yet.

        Raises:
            Exception: what ended the writer's thread, which nothing should.
        """
        if self._crash is not None:
            raise self._crash
        return self._committed

    def close(self, seconds: float = 2.0) -> bool:
        """Gives up what is not committed, closes the file and ends the thread; whether that was done in time."""
        self._stop.set()
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        os.close(self.wake)
        return True

    def _run(self) -> None:
        try:
            while (snapshot := self._waiting.get()) is not None:
                if self._write(snapshot):
                    self._committed = snapshot.number
                    os.eventfd_write(self.wake, 1)
            self._store.close()
        except BaseException as error:
            self._crash = error
            os.eventfd_write(self.wake, 1)

    def _write(self, snapshot: Snapshot) -> bool:
        """Tries until it is committed; False: told to stop before."""
        said_at = None
        while True:
            try:
                self._store.commit(snapshot)
            except (sqlite3.Error, OSError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                if said_at is None or time.monotonic() - said_at >= _REMINDER_SECONDS:
                    said_at = time.monotonic()
                    log(
                        logging.ERROR,
                        "state not written",
                        path=self.path,
                        error=self.failure,
                        effect="nothing becomes durable; actors wait once their windows are full; tried again",
                        every=self._interval,
                    )
                if self._stop.wait(self._interval):
                    return False
                continue
            if self.failure is not None:
                self.failure = None
                log(logging.WARNING, "state written again", path=self.path)
            return True
