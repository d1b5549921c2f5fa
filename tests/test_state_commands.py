"""``cotuned state``: shows, exports and resets what a daemon has kept; never under a running one."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from cotuned.client import ActorClient, LearnerClient
from tests.daemon_process import DaemonProcess
from tests.test_daemon import command


@pytest.fixture
def kept(daemon: DaemonProcess) -> DaemonProcess:
    """A daemon that has kept two runs, and was terminated."""
    for run in ("a", "b"):
        with ActorClient(daemon.endpoint, run=run) as actor, LearnerClient(daemon.endpoint, run=run) as learner:
            for step in range(3):
                actor.push(np.arange(1100) % 11)
                actor.push([3] * 5)
                actor.flush()
                learner.cotune(step, 1.0)
            learner.write(7, 0.1)
    ActorClient(daemon.endpoint, run="b", actor="left-behind").abandon()
    daemon.terminate()
    return daemon


def directory(daemon: DaemonProcess) -> str:
    return daemon.settings["state"]["directory"]


def test_show(kept: DaemonProcess) -> None:
    shown = json.loads(command("state", "show", "--json", "--directory", directory(kept)).stdout)
    assert shown["n_actions"] == 11
    assert shown["history_rows"] >= 6
    runs = {run["run"]: run for run in shown["runs"]}
    assert (runs["a"]["observations"], runs["a"]["updates"], runs["a"]["step"], runs["a"]["row"]) == (3, 3, 2, 0)
    assert (runs["a"]["streams"], runs["b"]["streams"]) == (0, 1)
    assert runs["a"]["alpha"] == runs["b"]["alpha"] != 0.2
    assert [(actor["actor"], actor["run"], actor["last"]) for actor in shown["actors"]] == [("left-behind", "b", 0)]
    table = command("state", "show", "--config", str(kept.folder / "cotuned.yaml")).stdout
    assert "state.db: 11 actions" in table
    assert "observations" in table


def test_export_of_the_history(kept: DaemonProcess, tmp_path: Path) -> None:
    told = command("state", "export", "history", "--directory", directory(kept)).stdout
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["step"] for line in lines if line["run"] == "a" and line["status"] == "updated"][-1] == 2
    out = tmp_path / "history.csv"
    arguments = ("state", "export", "history", "--format", "csv", "--out", str(out), "--directory", directory(kept))
    assert command(*arguments).returncode == 0
    table = list(csv.DictReader(out.open()))
    assert [float(line["alpha"]) for line in table] == [line["alpha"] for line in lines]
    assert table[0]["gate_rate"] == ""
    assert command(*arguments).returncode == 1  # a file that is there is not written over


def test_export_of_the_rows(kept: DaemonProcess) -> None:
    told = command("state", "export", "rows", "--directory", directory(kept)).stdout
    a, b = (json.loads(line) for line in told.splitlines())
    assert (a["run"], b["run"]) == ("a", "b")
    assert a["slot_7"] == float(np.float32(0.1))
    assert (a["pool_count_3"], a["pool_actions"], a["batches_train"]) == (5, 5, 6)
    assert sum(name.startswith("slot_") for name in a) == 1024
    table = csv.DictReader(
        io.StringIO(command("state", "export", "rows", "--format", "csv", "--directory", directory(kept)).stdout)
    )
    assert [float(row["slot_583"]) for row in table] == [a["slot_583"], b["slot_583"]]


def test_reset_moves_everything_aside(kept: DaemonProcess) -> None:
    folder = Path(directory(kept))
    before = (folder / "state.db").read_bytes()
    said = command("state", "reset", "--directory", directory(kept)).stdout
    (aside,) = folder.glob("state.db.reset-*Z")
    assert str(aside) in said
    assert aside.read_bytes() == before
    kept.restart()
    with LearnerClient(kept.endpoint) as learner:
        assert learner.status().runs == []


def test_reset_of_one_run_frees_its_row(kept: DaemonProcess) -> None:
    unknown = command("state", "reset", "--run", "c", "--directory", directory(kept))
    assert unknown.returncode == 1
    assert "got 'c', known are a, b" in unknown.stderr
    assert command("state", "reset", "--run", "b", "--directory", directory(kept)).returncode == 0
    kept.settings["bus"] = {"max_runs": 2}
    kept.restart()
    with LearnerClient(kept.endpoint, run="c") as learner:
        assert learner.cotune(0).alpha == pytest.approx(0.2)
        assert learner.status().runs == ["a", "c"]
        assert learner.status().actors == 0


def test_a_running_daemon_is_left_alone(daemon: DaemonProcess) -> None:
    with LearnerClient(daemon.endpoint) as learner:
        learner.write(7, 1.0)
        for arguments in (("show",), ("export", "rows"), ("reset",), ("reset", "--run", "default")):
            result = command("state", *arguments, "--directory", directory(daemon))
            assert result.returncode == 1
            assert f"in use by process {daemon.process.pid}" in result.stderr
        assert learner.write(7, 2.0) == 2.0


@pytest.mark.parametrize("arguments", [("show",), ("export", "history"), ("reset",)])
def test_nothing_there_is_said_and_nothing_is_made(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    missing = command("state", *arguments, "--directory", str(tmp_path / "none"))
    assert missing.returncode == 1
    assert "there is no folder" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = command("state", *arguments, "--directory", str(tmp_path / "empty"))
    assert empty.returncode == 1
    assert "there is no state in" in empty.stderr
    assert not (tmp_path / "empty" / "state.db").exists()
    off = command("state", *arguments, COTUNED_STATE__DIRECTORY="")
    assert off.returncode == 1
    assert "no state is kept" in off.stderr


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"\xff" * 5000)
    for arguments in (("show",), ("export", "rows"), ("reset", "--run", "a")):
        result = command("state", *arguments, "--directory", str(tmp_path))
        assert result.returncode == 1
        assert "is damaged" in result.stderr
        assert "Traceback" not in result.stderr
    assert (tmp_path / "state.db").read_bytes() == b"\xff" * 5000
    assert command("state", "reset", "--directory", str(tmp_path)).returncode == 0
