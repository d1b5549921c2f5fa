"""Opens the state directory at start: locked, checked, and what is damaged set aside."""

from __future__ import annotations

import logging
import sqlite3

from ..config.settings import Settings
from ..wire.errors import ConfigError, StateMismatch
from .logs import log
from .schema import Layout, layout_of
from .snapshot import Stored
from .state_directory import StateDirectory
from .store import Corrupt, StateStore


def open_state(settings: Settings, directory: StateDirectory) -> tuple[StateStore, Stored]:
    """The store, and what was kept before. A damaged file is renamed, never overwritten, and a new one begun.

    Raises:
        StateMismatch: the file is of another layout, or holds more runs than the bus has rows.
        ConfigError: the disk does not let it be opened.
    """
    layout = layout_of(settings)
    try:
        try:
            return _load(settings, directory, layout)
        except Corrupt as error:
            aside = directory.set_aside("corrupt")
            lost = "all runs begin anew: α, τ, slots and counters; actors count from what was confirmed to them"
            log(logging.ERROR, "state corrupt", error=str(error), kept_as=str(aside), lost=lost)
            return _load(settings, directory, layout)
    except (sqlite3.Error, OSError, Corrupt) as error:
        raise ConfigError(
            f"state.directory: cannot use {directory.file}: {error}; see to the disk and its permissions, or name "
            "another folder"
        ) from error


def _load(settings: Settings, directory: StateDirectory, layout: Layout) -> tuple[StateStore, Stored]:
    kept = settings.state
    store = StateStore(directory.file, kept.synchronous, kept.history_rows, layout)
    try:
        stored = store.load()
        if len(stored.runs) > settings.bus.max_runs:
            raise StateMismatch(
                f"{directory.file} holds {len(stored.runs)} runs, bus.max_runs allows {settings.bus.max_runs}; raise "
                "it, or free rows with `cotuned state reset --run NAME` (`cotuned state show` lists them)"
            )
    except BaseException:
        store.close()
        raise
    return store, stored
