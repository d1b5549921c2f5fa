"""The tables of ``state.db``, their version, and the layout of the bus that they were written for."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping

from ..config.settings import Settings
from ..wire.errors import StateMismatch
from ..wire.slots import Counter, PoolColumn, Slot

APPLICATION_ID = 0x636F7475
"""``cotu``: tells our files from other SQLite files (``PRAGMA application_id``)."""

VERSION = 1
"""``PRAGMA user_version`` of what this version writes."""

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""From version n to n + 1; runs inside the transaction that raises the version."""

_TABLES = """
CREATE TABLE layout (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
    name TEXT PRIMARY KEY,
    row INTEGER NOT NULL,
    slots BLOB NOT NULL,
    counters BLOB NOT NULL,
    pool BLOB NOT NULL,
    source TEXT NOT NULL,
    target REAL NOT NULL,
    batches_duplicate INTEGER NOT NULL,
    batches_early INTEGER NOT NULL,
    streams BLOB NOT NULL,
    sessions BLOB NOT NULL,
    written INTEGER NOT NULL
);
CREATE TABLE streams (
    number INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    actor TEXT NOT NULL,
    rejections BLOB NOT NULL,
    owner TEXT
);
CREATE TABLE history (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    run TEXT NOT NULL,
    step INTEGER,
    observations INTEGER NOT NULL,
    updates INTEGER NOT NULL,
    entropy REAL NOT NULL,
    last_entropy REAL NOT NULL,
    policy_entropy REAL,
    conditional_entropy REAL,
    gate_rate REAL,
    alpha REAL NOT NULL,
    tau REAL NOT NULL,
    error REAL,
    status TEXT NOT NULL
);
"""

Layout = dict[str, str]
"""What the BLOBs' meaning depends on, as text: number of actions and slots, and the slot table."""


def layout_of(settings: Settings) -> Layout:
    """The layout that these settings (and this version's slot table) ask for."""
    return {
        "n_actions": str(settings.n_actions),
        "n_slots": str(settings.bus.n_slots),
        "slots": json.dumps({slot.name: slot.value for slot in Slot}),
        "counters": json.dumps([counter.name for counter in Counter]),
        "pool_columns": json.dumps([column.name for column in PoolColumn]),
    }


def create(connection: sqlite3.Connection, layout: Layout) -> None:
    """Makes the tables of an empty file, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in filter(str.strip, _TABLES.split(";")):
        connection.execute(statement)
    connection.executemany("INSERT INTO layout VALUES (?, ?)", layout.items())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def migrate(
    connection: sqlite3.Connection,
    path: str,
    migrations: Mapping[int, Callable[[sqlite3.Connection], None]] = MIGRATIONS,
    version: int = VERSION,
) -> None:
    """Brings the file's tables to `version`, one transaction a step.

    Raises:
        StateMismatch: the file is not cotuned's, or was written by a newer version; it was not changed.
    """
    found_id = int(connection.execute("PRAGMA application_id").fetchone()[0])
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found_id != APPLICATION_ID:
        raise StateMismatch(
            f"{path} is a SQLite file of something else (application_id {found_id:#x}, expected "
            f"{APPLICATION_ID:#x}); name another state.directory"
        )
    if found > version or any(step not in migrations for step in range(found, version)):
        raise StateMismatch(
            f"{path} has schema version {found}, this cotuned reads {version} and what it knows to migrate; start the "
            "version that wrote it, name another state.directory, or start afresh with `cotuned state reset`"
        )
    for step in range(found, version):
        connection.execute("BEGIN IMMEDIATE")
        try:
            migrations[step](connection)
            connection.execute(f"PRAGMA user_version = {step + 1}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def check_layout(connection: sqlite3.Connection, path: str, layout: Layout) -> None:
    """Raises StateMismatch if the file was written for another layout; says what differs and what to do."""
    found: Layout = dict(connection.execute("SELECT key, value FROM layout"))
    differing = [key for key in layout if found.get(key) != layout[key]]
    if differing:
        told = "; ".join(f"{key} is {found.get(key, 'not said')}, expected {layout[key]}" for key in differing)
        raise StateMismatch(
            f"{path} was written with other settings: {told}. Start with those, name another state.directory, or "
            "start afresh with `cotuned state reset`"
        )
