"""ipc sockets with umask 000, in a folder that everybody may enter and write to."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotuned.client import LearnerClient
from tests.curve_keys import StartDaemon
from tests.daemon_process import DaemonProcess

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own folders are 0700, which would hide what the sockets' modes do."""
    path = Path(tempfile.mkdtemp(prefix="cotuned-ipc-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def start(start_daemon: StartDaemon, folder: Path) -> DaemonProcess:
    umask = os.umask(0)
    try:
        return start_daemon(endpoints={name: f"ipc://{folder}/{name}" for name in ("actions", "queries", "watch")})
    finally:
        os.umask(umask)


def test_nothing_is_for_others_whatever_the_umask(start_daemon: StartDaemon, folder: Path) -> None:
    daemon = start(start_daemon, folder)
    files = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert set(files) == {name + end for name in ("actions", "queries", "watch") for end in ("", ".lock")}
    assert not [name for name, mode in files.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)]
    assert daemon.events("ipc folder open")[0]["folder"] == str(folder)
    with LearnerClient(daemon.endpoint) as learner:
        learner.cotune(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(start_daemon: StartDaemon, folder: Path) -> None:
    start(start_daemon, folder)
    for name in ("actions", "queries", "watch"):
        attempt = [sys.executable, "-S", "-c", CONNECT, str(folder / name)]
        assert subprocess.run(attempt).returncode == 0  # the test can connect where it may
        refused = subprocess.run(
            ["/usr/bin/env", "python3", "-S", "-c", CONNECT, str(folder / name)],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin"},
        )
        if "python3" in refused.stderr and "No such file" in refused.stderr:
            pytest.skip("there is no python3 that another user can start")
        assert "Permission denied" in refused.stderr


def test_a_lock_is_not_taken_through_a_link(start_daemon: StartDaemon, folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "queries.lock").symlink_to(victim)
    daemon = start(start_daemon, folder)  # returns when it is ready, or has ended
    assert daemon.process.wait(10) == 1
    assert any("queries.lock" in str(line) for line in daemon.lines)
    assert victim.read_text() == "precious"
