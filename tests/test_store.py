"""The state file by itself: what goes in comes out, bounds, damage, other layouts, versions."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cotuned.config import Settings
from cotuned.kernels import RowState
from cotuned.service import schema
from cotuned.service.open_state import open_state
from cotuned.service.schema import layout_of
from cotuned.service.sessions import Sessions, Turn
from cotuned.service.snapshot import HistoryLine, RunRecord, Snapshot, StreamRecord, history_line
from cotuned.service.state_directory import StateDirectory
from cotuned.service.store import Corrupt, StateStore
from cotuned.wire.answers import CotuneAnswer
from cotuned.wire.errors import ConfigError, StateInUse, StateMismatch
from cotuned.wire.slots import Counter, PoolColumn

SETTINGS = Settings()


def opened(folder: Path, **settings: Any) -> StateStore:
    chosen = Settings.model_validate(settings)
    return StateStore(folder / "state.db", chosen.state.synchronous, chosen.state.history_rows, layout_of(chosen))


def record(name: str = "a", row: int = 0, streams: dict[int, int] | None = None, seed: int = 0) -> RunRecord:
    rng = np.random.default_rng(seed)
    state = RowState(
        rng.normal(size=1024).astype(np.float32),
        rng.integers(0, 2**62, len(Counter)),
        rng.integers(0, 2**62, 11 + len(PoolColumn)),
    )
    state.slots[597] = 1  # a TunerStatus
    pairs = np.array([list((streams or {}).keys()), list((streams or {}).values())], dtype=np.int64)
    return RunRecord(name, row, state, "executed", 2.35, 3, 4, pairs, Sessions().encode(), 1_000)


def snapshot(
    *runs: RunRecord,
    opened: tuple[StreamRecord, ...] = (),
    closed: tuple[int, ...] = (),
    rejections: tuple[Any, ...] = (),
    history: tuple[HistoryLine, ...] = (),
) -> Snapshot:
    return Snapshot(1, list(runs), list(opened), list(closed), list(rejections), list(history))


def test_what_goes_in_comes_out_bit_for_bit(tmp_path: Path) -> None:
    written = record(streams={5: 17, 2**63 - 1: 2**62})
    written.state.slots[:4] = [np.nan, -0.0, 1e-45, np.inf]
    rejected = [(3, "action_out_of_range", "executed[1]: got 11"), (9, "x", "ü")]
    streams = (StreamRecord(5, "a", "me", []), StreamRecord(2**63 - 1, "a", "you", rejected))
    store = opened(tmp_path)
    store.commit(snapshot(written, opened=streams))
    store.close()
    stored = opened(tmp_path).load()
    (read,) = stored.runs
    assert (read.name, read.row, read.source, read.target, read.batches_duplicate, read.batches_early) == (
        "a",
        0,
        "executed",
        2.35,
        3,
        4,
    )
    for name in ("slots", "counters", "pool"):
        assert getattr(read.state, name).tobytes() == getattr(written.state, name).tobytes()
    assert read.streams.tolist() == written.streams.tolist()
    assert sorted(stored.streams) == sorted(streams)


def test_streams_open_reject_and_close(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.commit(snapshot(record(streams={1: 0, 2: 0}), opened=(StreamRecord(1, "a", "x", []),) * 1, closed=(9,)))
    with pytest.raises(Corrupt, match="other streams"):
        store.load()  # stream 2 was never opened: such a file cannot be ours
    store.commit(snapshot(record(streams={1: 4}), rejections=((1, [(4, "c", "s")]),)))
    assert store.load().streams == [StreamRecord(1, "a", "x", [(4, "c", "s")])]
    store.commit(snapshot(record(streams={}), closed=(1,)))
    assert store.load().streams == []


def test_a_failed_commit_leaves_what_was_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.commit(snapshot(record(seed=1)))
    bad = record("b", 1, seed=2)
    with pytest.raises(sqlite3.Error):
        store.commit(snapshot(record(seed=3), bad, opened=(StreamRecord(1, None, "x", []),)))  # type: ignore[arg-type]
    (run,) = store.load().runs
    assert run.state.slots.tobytes() == record(seed=1).state.slots.tobytes()
    store.commit(snapshot(record(seed=4)))  # and the next one works


def test_the_file_is_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        directory = StateDirectory(tmp_path / "a" / "state")
        open_state(SETTINGS, directory)[0].commit(snapshot(record()))
    finally:
        os.umask(umask)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for file in directory.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize("most", [0, 1, 7, 100])
def test_history_is_bounded_and_the_newest_stay(tmp_path: Path, most: int) -> None:
    store = opened(tmp_path, state={"history_rows": most})
    line = history_line(record(), 0)
    for step in range(250):
        store.commit(snapshot(record(), history=(line._replace(step=step), line._replace(step=step, run="b"))))
        kept = [(told.step, told.run) for told in store.history()]
        everything = [(told, run) for told in range(step + 1) for run in ("a", "b")]
        assert len(kept) <= most
        assert kept == everything[len(everything) - len(kept) :]
    assert len(kept) >= 0.8 * most
    store.close()
    again = opened(tmp_path, state={"history_rows": most})
    again.commit(snapshot(record(), history=(line,)))
    assert len(list(again.history())) <= most


def test_more_lines_at_once_than_may_be_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, state={"history_rows": 3})
    line = history_line(record(), 0)
    store.commit(snapshot(history=tuple(line._replace(step=step) for step in range(10))))
    assert [told.step for told in store.history()] == [7, 8, 9]


DAMAGE = {
    "garbage": lambda data: b"\xff" * len(data),
    "not SQLite": lambda data: b"hello" + data[5:],
    "a page of zeros": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "cut off": lambda data: data[: len(data) // 2 // 4096 * 4096],
    "a short page": lambda data: data[:6000],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_set_aside_never_overwritten(tmp_path: Path, damage: Any) -> None:
    store = opened(tmp_path)
    store.commit(snapshot(record(), *(record(f"r{i}", i, seed=i) for i in range(1, 9))))
    store.close()
    bad = damage((tmp_path / "state.db").read_bytes())
    (tmp_path / "state.db").write_bytes(bad)
    for name in ("state.db-wal", "state.db-shm"):
        assert not (tmp_path / name).exists()
    directory = StateDirectory(tmp_path)
    store, stored = open_state(SETTINGS, directory)
    assert stored.runs == []
    (aside,) = tmp_path.glob("state.db.corrupt-*Z")
    assert aside.read_bytes() == bad
    store.commit(snapshot(record()))
    assert len(store.load().runs) == 1


def test_the_log_stays_small_enough_for_a_small_disk(tmp_path: Path) -> None:
    store = opened(tmp_path)
    sizes = []
    for seed in range(1200):
        store.commit(snapshot(record(seed=seed)))
        sizes.append((tmp_path / "state.db-wal").stat().st_size)
    store.close()
    assert max(sizes) > 2**20  # it was written to
    assert max(sizes) < 6 * 2**20


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE runs SET slots = x'0011'",
        "UPDATE runs SET pool = x''",
        "UPDATE runs SET sessions = x'c1'",
        "UPDATE runs SET sessions = x'01'",
        "UPDATE runs SET streams = x'00'",
        "UPDATE runs SET slots = 5",
        "INSERT INTO streams VALUES (1, 'a', 'x', x'90', NULL)",
        "DROP TABLE streams",
    ],
)
def test_values_that_cannot_be_are_corrupt(tmp_path: Path, change: str) -> None:
    store = opened(tmp_path)
    store.commit(snapshot(record()))
    store.close()
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute(change)
    connection.commit()
    connection.close()
    with pytest.raises(Corrupt):
        opened(tmp_path).load()


def test_two_files_set_aside_in_one_second_have_two_names(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    names = set()
    for content in (b"1", b"2", b"3"):
        (tmp_path / "state.db").write_bytes(content)
        (tmp_path / "state.db-wal").write_bytes(content)
        names.add(directory.set_aside("corrupt"))
    assert {name.read_bytes() for name in names} == {b"1", b"2", b"3"}
    assert {Path(f"{name}-wal").read_bytes() for name in names} == {b"1", b"2", b"3"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_actions": 4}, "n_actions is 11, expected 4"),
        ({"bus": {"n_slots": 640}}, "n_slots is 1024, expected 640"),
    ],
)
def test_another_layout_is_refused_and_left_alone(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    store = opened(tmp_path)
    store.commit(snapshot(record()))
    store.close()
    before = (tmp_path / "state.db").read_bytes()
    with pytest.raises(StateMismatch, match=f"{says}.*cotuned state reset"):
        opened(tmp_path, **settings)
    assert (tmp_path / "state.db").read_bytes() == before
    assert len(opened(tmp_path).load().runs) == 1


def test_another_slot_table_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute("UPDATE layout SET value = replace(value, '585', '999') WHERE key = 'slots'")
    connection.commit()
    connection.close()
    with pytest.raises(StateMismatch, match="slots is .*999"):
        opened(tmp_path)


def test_more_runs_than_rows_are_refused(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    store, _ = open_state(SETTINGS, directory)
    store.commit(snapshot(*(record(f"r{i}", i) for i in range(3))))
    store.close()
    with pytest.raises(StateMismatch, match="holds 3 runs, bus.max_runs allows 2"):
        open_state(Settings.model_validate({"bus": {"max_runs": 2}}), directory)


def test_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    connection.close()
    with pytest.raises(StateMismatch, match=f"schema version {schema.VERSION + 1}, this cotuned reads"):
        open_state(SETTINGS, StateDirectory(tmp_path))
    assert list(tmp_path.glob("*corrupt*")) == []


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(StateMismatch, match="of something else"):
        open_state(SETTINGS, StateDirectory(tmp_path))
    assert list(tmp_path.glob("*corrupt*")) == []


def test_migrations_run_in_order_and_one_that_fails_changes_nothing(tmp_path: Path) -> None:
    """There is one version yet, so the steps are this test's; the mechanism is the one that later versions use."""
    opened(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "state.db", isolation_level=None)

    def add(column: str) -> Any:
        return lambda connection: connection.execute(f"ALTER TABLE history ADD COLUMN {column}")

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE history ADD COLUMN half")
        raise RuntimeError("no")

    one, two, three = schema.VERSION, schema.VERSION + 1, schema.VERSION + 2
    with pytest.raises(RuntimeError):
        schema.migrate(connection, "x", {one: add("first"), two: fail}, three)
    assert connection.execute("PRAGMA user_version").fetchone() == (two,)  # the first step is done and stays
    schema.migrate(connection, "x", {two: add("second")}, three)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(history)")]
    assert columns[-2:] == ["first", "second"]
    with pytest.raises(StateMismatch, match=f"schema version {three}"):
        schema.migrate(connection, "x", {}, three + 1)  # no step is known from there


def test_a_file_that_is_moved_in_use_is_an_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (tmp_path / "state.db").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="moved or removed while in use"):
        store.commit(snapshot(record()))
    (tmp_path / "elsewhere").rename(tmp_path / "state.db")
    store.commit(snapshot(record()))


def test_a_directory_is_locked(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    with pytest.raises(StateInUse, match=f"in use by process {os.getpid()}"):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "state", Path("/proc/cotuned/state")):
        with pytest.raises(ConfigError, match="state.directory: cannot write in"):
            StateDirectory(where)
    with pytest.raises(ConfigError, match="there is no folder"):
        StateDirectory(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_sessions_come_out_as_they_went_in() -> None:
    answer = CotuneAnswer(
        run="a", step=7, alpha=0.1 + 0.2, log_alpha=-1e-300, tau=1.0, log_tau=0.0, entropy=1.5, policy_entropy=None,
        conditional_entropy=2.0, gate_rate=None, target_entropy=2.35, error=None, source="executed", observations=3,
        ready=True, fresh=True, at_bound=False, owner=True, reason="raised α",
    )  # fmt: skip
    sessions = Sessions()
    assert Sessions.decode(sessions.encode()).last_step is None
    for session in range(2000):
        sessions.answered(session, 3, answer)
    sessions.answered(2**63 - 1, 7, answer)
    again = Sessions.decode(sessions.encode())
    assert (again.stored, again.last_step) == (answer, 7)
    assert again.turn(2**63 - 1, 7) is Turn.REPEATED
    assert again.turn(2**63 - 1, 8) is Turn.NEW_STEP
    assert again.turn(1999, 9) is Turn.NOT_OWNER
    assert again.turn(10, 9) is Turn.NEW_STEP  # forgotten by then
    assert again.encode() == sessions.encode()
