"""``cotuned state show | export | reset``: what a daemon has kept, without the daemon. They take its lock."""

from __future__ import annotations

import argparse
import csv
import json
import sqlite3
import sys
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..config.load import load
from ..wire.errors import ConfigError, StateMismatch, UnknownRun
from ..wire.slots import Counter, PoolColumn, Slot
from .sessions import Sessions
from .snapshot import HistoryLine, RunRecord, Stored
from .state_directory import StateDirectory
from .store import Corrupt, StateStore


def add_state_commands(command: argparse.ArgumentParser, add: Any) -> None:
    """Adds the three commands below ``cotuned state``; `add` makes one."""
    commands = command.add_subparsers(metavar="COMMAND", required=True)
    show = add(commands, "show", "print runs, α, τ and streams as they were last written", _show)
    show.add_argument("--json", action="store_true", help="print JSON instead of a table")
    export = add(commands, "export", "write the history, or every number of every run", _export)
    export.add_argument("what", choices=["history", "rows"], help="one line a commit and run, or one a run")
    export.add_argument("--format", choices=["jsonl", "csv"], default="jsonl", help="%(default)s unless given")
    export.add_argument("--out", metavar="FILE", help="a new file to write to (default: standard output)")
    reset = add(commands, "reset", "move all state aside, so that the next daemon starts afresh", _reset)
    reset.add_argument("--run", dest="run_name", metavar="NAME", help="only remove this run, and free its row")
    for each in (show, export, reset):
        each.add_argument("--config", metavar="FILE", help="settings file that names the state directory")
        each.add_argument("--directory", metavar="DIR", help="the state directory (default: as configured here)")


@contextmanager
def _directory(namespace: argparse.Namespace) -> Generator[StateDirectory, None, None]:
    named = namespace.directory or load(namespace.config).state.directory
    if named is None:
        raise ConfigError('state.directory: is "" here, so no state is kept; name one with --directory')
    directory = StateDirectory(named, create=False)
    try:
        if not directory.file.exists():
            raise ConfigError(f"state.directory: there is no state in {directory.path}; a daemon makes it at its start")
        yield directory
    finally:
        directory.close()


@contextmanager
def _store(directory: StateDirectory) -> Generator[StateStore, None, None]:
    try:
        store = StateStore(directory.file)
        try:
            yield store
        finally:
            store.close()
    except Corrupt as error:
        raise StateMismatch(
            f"{directory.file} is damaged: {error}; a daemon sets it aside at its next start, `cotuned state reset` now"
        ) from error
    except sqlite3.Error as error:
        raise OSError(f"cannot use {directory.file}: {error}") from error


def _show(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    with _directory(namespace) as directory, _store(directory) as store:
        stored, layout = store.load(), store.layout
        n_history = sum(1 for _ in store.history())
    runs = [_summary(run) for run in stored.runs]
    if namespace.json:
        shown = {"file": str(directory.file), "n_actions": int(layout["n_actions"]), "n_slots": int(layout["n_slots"])}
        print(json.dumps({**shown, "history_rows": n_history, "runs": runs, "actors": _actors(stored)}))
        return 0
    print(f"{directory.file}: {layout['n_actions']} actions, {n_history} lines of history")
    table = Table(box=None)
    for name in runs[0] if runs else ("run",):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in run.values()))
    Console(width=None if sys.stdout.isatty() else 200).print(table)  # a pipe has no width to fit into
    return 0


def _summary(run: RunRecord) -> dict[str, Any]:
    slots, counters = run.state.slots, run.state.counters
    return {
        "run": run.name,
        "row": run.row,
        "observations": int(counters[Counter.OBSERVATIONS]),
        "updates": int(counters[Counter.UPDATES]),
        "step": Sessions.decode(run.sessions).last_step,
        "entropy": float(slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX]),
        "alpha": float(slots[Slot.ALPHA]),
        "tau": float(slots[Slot.TAU]),
        "streams": int(run.streams.shape[1]),
        "written": _time(run.written),
    }


def _actors(stored: Stored) -> list[dict[str, Any]]:
    last = {number: last for run in stored.runs for number, last in run.streams.T.tolist()}
    return [
        {"actor": stream.actor, "run": stream.run, "stream": stream.number, "last": last[stream.number]}
        for stream in stored.streams
    ]


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="milliseconds")


def _export(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    with ExitStack() as stack:
        store = stack.enter_context(_store(stack.enter_context(_directory(namespace))))
        out = stack.enter_context(Path(namespace.out).open("x", encoding="utf-8")) if namespace.out else sys.stdout
        if namespace.what == "history":
            _write(out, namespace.format, HistoryLine._fields, (line._asdict() for line in store.history()))
        else:
            rows = [_row(run, int(store.layout["n_actions"])) for run in store.load().runs]
            _write(out, namespace.format, tuple(rows[0]) if rows else ("run",), rows)
    return 0


def _row(run: RunRecord, n_actions: int) -> dict[str, Any]:
    """Everything that a run's row holds: counters and pool columns by name, slots by number, counts by action."""
    state, pool = run.state, run.state.pool.tolist()
    return {
        "run": run.name,
        "row": run.row,
        "written": run.written,
        "source": run.source,
        "target": run.target,
        **{counter.name.lower(): int(state.counters[counter]) for counter in Counter},
        **{f"pool_{column.name.lower()}": pool[n_actions + column] for column in PoolColumn},
        **{f"pool_count_{action}": pool[action] for action in range(n_actions)},
        **{f"slot_{number}": value for number, value in enumerate(state.slots.tolist())},
    }


def _write(out: IO[str], kind: str, columns: tuple[str, ...], lines: Iterable[dict[str, Any]]) -> None:
    if kind == "csv":
        table = csv.DictWriter(out, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(lines)
        return
    for line in lines:
        out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _reset(namespace: argparse.Namespace, _: dict[str, Any]) -> int:
    with _directory(namespace) as directory:
        if namespace.run_name is None:
            print(f"moved to {directory.set_aside('reset')}; the next daemon starts afresh")
            return 0
        with _store(directory) as store:
            known = [run.name for run in store.load().runs]
            if not store.remove_run(namespace.run_name):
                raise UnknownRun(f"--run: got {namespace.run_name!r}, known are {', '.join(known) or 'none'}")
    print(f"removed run {namespace.run_name} and its streams; its history stays")
    return 0
