"""`StateStore`: the state file. SQLite in WAL mode; a snapshot goes in as one transaction, or not at all.

Numbers of the bus are BLOBs, little-endian, exactly as they stand in memory: float32 slots, int64 counters, int64 pool.
The last batch numbers of a run's streams are one BLOB too, so that four thousand actors do not cost four thousand rows
a commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgpack as _untyped_msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from ..kernels import RowState
from . import schema
from .sessions import Sessions
from .snapshot import HistoryLine, Rejections, RunRecord, Snapshot, Stored, StreamRecord

msgpack: Any = _untyped_msgpack

_BUSY_SECONDS = 5.0
"""How long a commit waits for somebody who reads the file with another tool and holds it."""
_CHECKPOINT_PAGES = 1024
"""Pages of 4 KiB in the log at which it is folded into the file: that flushes the disk, and commits wait for it. With
more of them the log alone could fill a small disk, and leave no room to be folded."""
_WAL_BYTES = 2 * 4096 * _CHECKPOINT_PAGES
"""What a log that has grown further is cut back to."""

_INSERT_RUN = "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_STREAM = "INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?)"
_INSERT_HISTORY = f"INSERT INTO history VALUES (NULL{', ?' * len(HistoryLine._fields)})"
_DELETE_OLDEST = "DELETE FROM history WHERE id IN (SELECT id FROM history ORDER BY id LIMIT ?)"


_ENVIRONMENT = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}
"""Errors that say nothing about the file's contents."""


class Corrupt(Exception):
    """The file is not what this version of cotuned, or SQLite, can have written."""


@contextlib.contextmanager
def _corruption() -> Generator[None, None, None]:
    """The one place where what SQLite and the decoders raise about bad contents becomes `Corrupt`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
            raise
        raise Corrupt(str(error)) from error
    except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error


class StateStore:
    """An open state file. One thread uses it at a time.

    Args:
        path: the file; made if it is not there or empty. Its folder is locked by the caller.
        synchronous: SQLite's ``PRAGMA synchronous``.
        history_rows: most lines of history kept.
        layout: checked against the file's; None (for tools that show what there is): whatever it has, and an empty
            file is corrupt.

    Raises:
        Corrupt: SQLite or its own check finds the file damaged.
        StateMismatch: it is sound, and of another layout or version.
        sqlite3.OperationalError: the disk does not let it be opened.
    """

    def __init__(
        self, path: Path, synchronous: str = "normal", history_rows: int = 0, layout: schema.Layout | None = None
    ) -> None:
        self.path = path
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would make it by the umask
        self._inode = os.stat(path).st_ino
        self._history_rows = history_rows
        self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with _corruption():
                self._open(synchronous, layout)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, synchronous: str, layout: schema.Layout | None) -> None:
        execute = self._connection.execute
        if execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            if layout is None:
                raise Corrupt("there are no tables in it")
            execute("PRAGMA journal_mode = WAL")
            schema.create(self._connection, layout)
        schema.migrate(self._connection, str(self.path))
        found = execute("PRAGMA quick_check(3)").fetchall()
        if found != [("ok",)]:
            raise Corrupt("; ".join(str(line[0]) for line in found)[:300])
        if layout is not None:
            schema.check_layout(self._connection, str(self.path), layout)
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {synchronous}")
        execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # the file has its pages while there is room
        self.layout: schema.Layout = dict(execute("SELECT key, value FROM layout"))
        self._n_history = int(execute("SELECT count(*) FROM history").fetchone()[0])

    def load(self) -> Stored:
        """All runs and streams.

        Raises:
            Corrupt: a value is not what was written there once.
        """
        with _corruption():
            runs = [self._run(row) for row in self._connection.execute("SELECT * FROM runs ORDER BY row")]
            for run in runs:
                Sessions.decode(run.sessions)
            streams = [
                StreamRecord(number, run, actor, _unpack(rejections), owner)
                for number, run, actor, rejections, owner in self._connection.execute("SELECT * FROM streams")
            ]
        opened, counted = {s.number for s in streams}, [n for run in runs for n in run.streams[0].tolist()]
        if len(counted) != len(opened) or opened != set(counted):
            raise Corrupt("the runs count other streams than were opened")
        return Stored(runs, streams)

    def _run(self, row: Any) -> RunRecord:
        name, place, slots, counters, pool, source, target, duplicate, early, streams, sessions, written = row
        state = RowState(
            np.frombuffer(slots, "<f4").astype(np.float32),
            np.frombuffer(counters, "<i8").astype(np.int64),
            np.frombuffer(pool, "<i8").astype(np.int64),
        )
        n_slots, n_actions = int(self.layout["n_slots"]), int(self.layout["n_actions"])
        counted, columns = json.loads(self.layout["counters"]), json.loads(self.layout["pool_columns"])
        sizes = (state.slots.size, state.counters.size, state.pool.size)
        if sizes != (n_slots, len(counted), n_actions + len(columns)):
            raise Corrupt(f"run {name!r} has {sizes} numbers")
        numbers = np.frombuffer(streams, "<i8").astype(np.int64).reshape(2, -1)
        return RunRecord(name, place, state, source, target, duplicate, early, numbers, bytes(sessions), written)

    def commit(self, snapshot: Snapshot) -> None:
        """Returns when the snapshot is in the file: a killed process does not lose it any more.

        Raises:
            sqlite3.Error, OSError: nothing of it is in the file; it may be tried again.
        """
        try:
            if os.stat(self.path).st_ino != self._inode:
                raise FileNotFoundError
        except FileNotFoundError:
            raise OSError(f"{self.path} was moved or removed while in use; restart the daemon") from None
        many = self._connection.executemany
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            many("DELETE FROM streams WHERE number = ?", [(number,) for number in snapshot.closed])
            many(_INSERT_STREAM, [(s.number, s.run, s.actor, _pack(s.rejections), s.owner) for s in snapshot.opened])
            many(
                "UPDATE streams SET rejections = ? WHERE number = ?",
                [(_pack(rejections), number) for number, rejections in snapshot.rejections],
            )
            many(_INSERT_RUN, [_columns(run) for run in snapshot.runs])
            n_history = self._add_history(snapshot.history)
            self._connection.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):  # SQLite has rolled back by itself after some errors
                self._connection.execute("ROLLBACK")
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                # The log may give back room. Not after other errors: it would wait for a busy file once more.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            raise
        self._n_history = n_history

    def _add_history(self, lines: list[HistoryLine]) -> int:
        most = self._history_rows
        if not lines or most == 0:
            return self._n_history
        self._connection.executemany(_INSERT_HISTORY, lines[-most:])
        n_lines = self._n_history + min(len(lines), most)
        if n_lines > most:
            # A tenth at a time, so that a full history does not cost a deletion every commit.
            n_oldest = min(n_lines - most + most // 10, n_lines - 1)
            self._connection.execute(_DELETE_OLDEST, (n_oldest,))
            n_lines -= n_oldest
        return n_lines

    def history(self) -> Iterator[HistoryLine]:
        """All lines, oldest first."""
        columns = ", ".join(HistoryLine._fields)
        with _corruption():
            for row in self._connection.execute(f"SELECT {columns} FROM history ORDER BY id"):
                yield HistoryLine(*row)

    def remove_run(self, name: str) -> bool:
        """Removes a run and its streams, not its history; whether there was one."""
        with _corruption():
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("DELETE FROM streams WHERE run = ?", (name,))
            n_removed = self._connection.execute("DELETE FROM runs WHERE name = ?", (name,)).rowcount
            self._connection.execute("COMMIT")
        return n_removed > 0

    def close(self) -> None:
        """Closes the file; SQLite folds its log into it."""
        self._connection.close()


def _pack(rejections: Rejections) -> bytes:
    return msgpack.packb(rejections)


def _unpack(rejections: bytes) -> Rejections:
    return [(int(number), str(code), str(why)) for number, code, why in msgpack.unpackb(rejections, max_ext_len=0)]


def _columns(run: RunRecord) -> tuple[Any, ...]:
    state = run.state
    return (
        run.name,
        run.row,
        state.slots.astype("<f4", copy=False).tobytes(),
        state.counters.astype("<i8", copy=False).tobytes(),
        state.pool.astype("<i8", copy=False).tobytes(),
        run.source,
        run.target,
        run.batches_duplicate,
        run.batches_early,
        run.streams.astype("<i8", copy=False).tobytes(),
        run.sessions,
        run.written,
    )
