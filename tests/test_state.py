"""Durable state of a real daemon: what a restart keeps, what is refused at start, what an answer promises."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from cotuned.client import ActorClient, BatchRejected, DaemonUnreachable, LearnerClient, StateUnavailable, StreamLost
from cotuned.wire import Slot, decode_control, encode_control
from tests.daemon_process import DaemonProcess, wait_until

UNIFORM = np.arange(1100) % 11
SLOTS = [420, *range(583, 640), 7, 1023]
DEATHS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])


def row(daemon: DaemonProcess, run: str = "default") -> tuple[list[float], dict[str, Any]]:
    """Slots and counters over the wire. Not those that count what the transport does, nor open streams."""
    with LearnerClient(daemon.endpoint, run=run) as learner:
        stats = learner.stats()
        counted = {name: getattr(stats, name) for name in stats.__dataclass_fields__}
        for name in ("batches_duplicate", "batches_early", "actors"):
            del counted[name]
        return [learner.read(slot) for slot in SLOTS], counted


def die(daemon: DaemonProcess, number: int) -> None:
    daemon.terminate(number)
    daemon.restart()


def refused(daemon: DaemonProcess, **settings: Any) -> str:
    """Starts a daemon with other settings in this one's folder; expects that it ends with exit code 1, and says why."""
    file = daemon.folder / "other.yaml"
    ports = dict.fromkeys(("actions", "queries", "watch"), "tcp://127.0.0.1:0")
    file.write_text(json.dumps({**daemon.settings, "endpoints": ports, **settings}))
    result = subprocess.run(
        [sys.executable, "-m", "cotuned.service", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@DEATHS
def test_a_restart_keeps_every_run_bit_for_bit(daemon: DaemonProcess, number: int) -> None:
    rng = np.random.default_rng(4)
    for run in ("a", "b", "default"):
        with ActorClient(daemon.endpoint, run=run) as actor, LearnerClient(daemon.endpoint, run=run) as learner:
            for step in range(5):
                actor.push(rng.integers(0, 11, 700), proposed=rng.integers(0, 11, 700), phase="prefill")
                probs = rng.dirichlet(np.ones(11), 300)
                actor.push(rng.integers(0, 5, 300), probs=probs)  # every other step leaves a pool half full
                actor.flush()
                learner.cotune(step, 1.5)
            actor.push(rng.integers(0, 11, 500))
            learner.write(7, 0.1)
    before = [row(daemon, run) for run in ("a", "b", "default")]
    assert all(counted["pooled_actions"] > 0 for _, counted in before)
    die(daemon, number)
    assert [row(daemon, run) for run in ("a", "b", "default")] == before
    assert daemon.events("state restored")[0]["runs"] == ["a", "b", "default"]
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().runs == ["a", "b", "default"]
        assert learner.status().state == "kept"


@DEATHS
def test_a_step_that_was_answered_is_answered_the_same_after_a_restart(daemon: DaemonProcess, number: int) -> None:
    with ActorClient(daemon.endpoint) as actor, LearnerClient(daemon.endpoint) as older:
        actor.push(UNIFORM)
        actor.flush()
        older.cotune(3)
        with LearnerClient(daemon.endpoint) as learner:
            actor.push(UNIFORM)
            actor.flush()
            told = learner.cotune(10, 2.0)
            assert told.fresh
            die(daemon, number)
            assert learner.cotune(10, 2.0) == told
            assert learner.cotune(4) == told  # an older one
            assert learner.entropy().policy_entropy == 2.0  # counted once
            assert not older.cotune(99).owner
            assert learner.cotune(11).owner


def test_an_answer_comes_only_when_it_is_on_disk(daemon: DaemonProcess) -> None:
    """Killed at once after each answer: none was ahead of the disk."""
    with LearnerClient(daemon.endpoint) as learner:
        for step in range(10):
            told = learner.cotune(step, 1.0 + step / 100)
            written = learner.write(100 + step, 0.3 * step)
            daemon.kill()
            daemon.restart()
            assert learner.cotune(step) == told
            assert learner.read(100 + step) == written


def test_a_flush_returns_when_the_batches_are_on_disk(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(state={"directory": None})
    daemon.terminate()
    daemon.settings["state"] = {"directory": str(daemon.folder / "state"), "interval": 60}
    daemon.restart()
    with ActorClient(daemon.endpoint, window=8) as actor:
        for round_ in range(1, 6):
            actor.push([round_] * 3)
            actor.flush()
            assert actor.unconfirmed == 0
            daemon.kill()
            daemon.restart()
            with LearnerClient(daemon.endpoint) as learner:
                assert learner.stats().batches == round_  # before the actor could have sent anything again
    with ActorClient(daemon.endpoint, window=8) as actor:
        for _ in range(50):  # a full window makes the daemon commit, though the interval is a minute
            actor.push([1])
        assert actor.unconfirmed <= 8


def test_changes_that_nobody_waits_for_are_written_within_the_interval(daemon: DaemonProcess) -> None:
    actor = ActorClient(daemon.endpoint, run="x")
    actor.push([1, 2])
    with LearnerClient(daemon.endpoint, run="x") as learner:
        wait_until(lambda: learner.stats().batches == 1)

        def written() -> bool:
            connection = sqlite3.connect(daemon.folder / "state" / "state.db")
            try:
                found = connection.execute("SELECT pool FROM runs WHERE name = 'x'").fetchone()
                return found is not None and int(np.frombuffer(found[0], "<i8")[:11].sum()) == 2
            finally:
                connection.close()

        wait_until(written)
    actor.abandon()


def test_streams_and_their_rejections_survive(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint, actor="me") as actor:
        actor.n_actions = 12
        actor.push([1])
        actor.push([11])
        actor.push([2])
        with LearnerClient(daemon.endpoint) as learner:
            wait_until(lambda: learner.stats().batches_rejected == 1)
        daemon.terminate()
        daemon.restart()
        with pytest.raises(BatchRejected, match="batch 2 was rejected"):
            actor.flush()
        actor.flush()
        daemon.kill()
        daemon.restart()
        actor.push([3])
        actor.flush()  # what was seen is not said again
        with LearnerClient(daemon.endpoint) as learner:
            assert learner.stats().batches == 3
            assert learner.stats().batches_rejected == 1
            assert learner.stats().actors == 1
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.stats().actors == 0


def test_a_queries_answer_does_not_wait_for_the_disk(start_daemon: Callable[..., DaemonProcess]) -> None:
    """Another process locks the file, so no commit ends; what changes nothing is answered all the same."""
    daemon = start_daemon()
    with LearnerClient(daemon.endpoint, timeout=2) as learner:
        told = learner.cotune(0)
        blocker = sqlite3.connect(daemon.folder / "state" / "state.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(daemon.endpoint)
        request = {"id": 9, "op": "cotune", "session": learner.session, "step": 1}
        socket.send(encode_control(request))
        assert not socket.poll(500)  # held
        assert learner.entropy().observations == 0
        assert learner.stats().updates == 0
        assert learner.read("TAU") == told.tau
        rank = LearnerClient(daemon.endpoint, session=learner.session, timeout=0.3)
        with rank, pytest.raises(DaemonUnreachable):
            rank.cotune(1)  # repeated, and not on disk yet: held too
        assert socket.poll(5000)  # not for ever
        assert decode_control(socket.recv())["error"]["code"] == "state_unavailable"
        blocker.execute("ROLLBACK")
        blocker.close()
        socket.send(encode_control(request))
        assert socket.poll(5000)
        assert decode_control(socket.recv())["answer"]["step"] == 1
        assert learner.stats().updates == 0
        socket.close(0)


def test_a_damaged_file_is_set_aside_and_said(daemon: DaemonProcess) -> None:
    with LearnerClient(daemon.endpoint) as learner:
        learner.write(7, 3.0)
    daemon.terminate()
    file = daemon.folder / "state" / "state.db"
    bad = b"\xff" * 9000
    file.write_bytes(bad)
    daemon.restart()
    said = daemon.events("state corrupt")[0]
    assert said["level"] == "error"
    assert Path(said["kept_as"]).read_bytes() == bad
    assert "begin anew" in said["lost"]
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.status().runs == []
        learner.write(7, 4.0)
    die(daemon, signal.SIGKILL)
    with LearnerClient(daemon.endpoint) as learner:
        assert learner.read(7) == 4.0


def test_other_settings_are_refused_at_start(daemon: DaemonProcess) -> None:
    with LearnerClient(daemon.endpoint, run="a") as a, LearnerClient(daemon.endpoint, run="b") as b:
        a.write(7, 1)
        b.write(7, 1)
    daemon.terminate()
    assert "n_actions is 11, expected 4" in refused(daemon, n_actions=4)
    assert "n_slots is 1024, expected 2048" in refused(daemon, bus={"n_slots": 2048})
    said = refused(daemon, bus={"max_runs": 1})
    assert "holds 2 runs, bus.max_runs allows 1" in said
    assert "cotuned state reset" in said
    daemon.restart()


def test_a_second_daemon_is_refused(daemon: DaemonProcess) -> None:
    said = refused(daemon)
    assert f"in use by process {daemon.process.pid}" in said
    with LearnerClient(daemon.endpoint) as learner:
        learner.write(7, 1)
    daemon.kill()
    daemon.restart()  # a lock file left behind is none


def test_a_directory_that_cannot_be_written_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.terminate()
    (tmp_path / "file").write_text("")
    assert "state.directory: cannot write in" in refused(daemon, state={"directory": str(tmp_path / "file")})
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(read_only)], capture_output=True)
    if mounted.returncode != 0:  # not root, whom modes would not stop
        read_only.chmod(0o500)
    try:
        said = refused(daemon, state={"directory": str(read_only)})
        assert f"cannot write in {read_only}" in said
        assert 'or "" to keep nothing' in said
        assert "cannot write in" in refused(daemon, state={"directory": str(read_only / "below")})
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(read_only)], check=True)


def test_the_settings_of_this_start_decide_the_tuner(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint) as actor, LearnerClient(daemon.endpoint) as learner:
        actor.push(UNIFORM)
        actor.flush()
        learner.cotune(0, 1.0)
        daemon.terminate()
        daemon.settings["tuner"] = {"target_entropy": 0.5, "source": "policy"}
        daemon.restart()
        changed = daemon.events("tuner changed")[0]
        assert changed["now"] == {"source": "policy", "target": 0.5}
        assert changed["before"]["source"] == "executed"
        answer = learner.cotune(1)
        assert answer.fresh  # the other source has an observation that no update has seen
        assert answer.error == pytest.approx(0.5 - 1.0)
        assert not learner.cotune(2).fresh


def test_older_state_is_said_to_actors(daemon: DaemonProcess) -> None:
    with ActorClient(daemon.endpoint) as actor:
        actor.push([1])
        actor.flush()
        daemon.terminate()
        older = (daemon.folder / "state" / "state.db").read_bytes()
        daemon.restart()
        actor.push([2])
        actor.flush()
        daemon.terminate()
        (daemon.folder / "state" / "state.db").write_bytes(older)  # somebody put a backup back
        daemon.restart()
        actor.push([3])
        with pytest.raises(StreamLost, match="confirmed batches up to 2 and now knows only 1"):
            actor.flush()
        actor.abandon()


def test_a_moved_file_is_an_error_and_not_a_loss_in_silence(daemon: DaemonProcess) -> None:
    file = daemon.folder / "state" / "state.db"
    with LearnerClient(daemon.endpoint) as learner:
        file.rename(file.with_name("elsewhere"))
        with pytest.raises(StateUnavailable):
            learner.cotune(0)
        assert "moved or removed" in daemon.events("state not written")[0]["error"]
        file.with_name("elsewhere").rename(file)
        wait_until(lambda: learner.status().state == "kept")
        assert learner.cotune(0).step == 0


def test_history_is_kept_and_bounded(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(state={"directory": None})
    daemon.terminate()
    daemon.settings["state"] = {"directory": str(daemon.folder / "state"), "history_rows": 20}
    daemon.restart()
    with LearnerClient(daemon.endpoint) as learner:
        for step in range(50):
            told = learner.cotune(step, 1.0)
    daemon.terminate()
    connection = sqlite3.connect(daemon.folder / "state" / "state.db")
    lines = connection.execute("SELECT step, alpha, policy_entropy, status FROM history ORDER BY id").fetchall()
    connection.close()
    assert 10 < len(lines) <= 20
    assert lines[-1] == (49, told.alpha, 1.0, "waiting")
    assert [line[0] for line in lines] == list(range(50 - len(lines), 50))


def test_rows_are_taken_again_where_they_are_free(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(bus={"max_runs": 3})
    for run in ("a", "b", "c"):
        with LearnerClient(daemon.endpoint, run=run) as learner:
            learner.write(7, ord(run))
    daemon.terminate()
    connection = sqlite3.connect(daemon.folder / "state" / "state.db")
    connection.execute("DELETE FROM runs WHERE name = 'a'")
    connection.commit()
    connection.close()
    daemon.settings["bus"] = {"max_runs": 2}  # c's row is beyond the bus now
    for runs in (2, 3):
        daemon.settings["bus"] = {"max_runs": runs}
        daemon.restart()
        for run in ("b", "c"):
            with LearnerClient(daemon.endpoint, run=run) as learner:
                assert learner.read(7) == ord(run)
        daemon.terminate()
    daemon.restart()
    with LearnerClient(daemon.endpoint, run="d") as learner:
        assert learner.write(7, 100) == 100
        assert learner.read(Slot.TAU) == 1.0
