"""A disk that fails in mid-run and works again: a small tmpfs that is filled, a limit of the daemon's file sizes."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from cotuned.client import ActorClient, FlushTimeout, LearnerClient, StateUnavailable, WindowFull
from tests.daemon_process import DaemonProcess, wait_until

UNIFORM = np.arange(1100) % 11


class Disk:
    """The folder that a daemon keeps its state in, and how to make writing there fail."""

    def __init__(self, kind: str, folder: Path, cleanup: ExitStack) -> None:
        self.kind, self.folder = kind, folder
        folder.mkdir()
        if kind == "full":
            mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
            mounted = subprocess.run(mount, capture_output=True, text=True)
            if mounted.returncode != 0:
                pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
            cleanup.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)

    def fail(self, daemon: DaemonProcess) -> None:
        """From now on no file grows."""
        if self.kind == "full":
            with pytest.raises(OSError, match="No space left"), (self.folder / "filler").open("wb", 0) as filler:
                while True:
                    filler.write(bytes(1024))
        else:
            log = self.folder / "state.db-wal"
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY))

    def work(self, daemon: DaemonProcess) -> None:
        """From now on it works again."""
        if self.kind == "full":
            (self.folder / "filler").unlink()
        else:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture(params=["full", "limited"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with ExitStack() as cleanup:
        yield Disk(request.param, tmp_path / "disk", cleanup)


def test_nothing_is_lost_while_the_disk_fails(start_daemon: Callable[..., DaemonProcess], disk: Disk) -> None:
    daemon = start_daemon(state={"directory": str(disk.folder)})
    actor = ActorClient(daemon.endpoint, window=8, timeout=1)
    with LearnerClient(daemon.endpoint, timeout=10) as learner:
        actor.push(UNIFORM)
        actor.flush()
        disk.fail(daemon)

        with pytest.raises(StateUnavailable, match="the step was taken"):
            learner.cotune(0)  # before the daemon knew; the client asks again after a second
        wait_until(lambda: learner.status().state == "failing")
        taken = learner.stats()
        assert taken.updates == 1
        for ask in (lambda: learner.cotune(1), lambda: learner.write(7, 1.0)):
            with pytest.raises(StateUnavailable, match="cannot write its state .* nothing was changed"):
                ask()
        with (
            LearnerClient(daemon.endpoint) as newer,
            pytest.raises(StateUnavailable, match="nothing was changed"),
        ):
            newer.cotune(0)
        with LearnerClient(daemon.endpoint, run="new") as other, pytest.raises(StateUnavailable):
            other.cotune(0)
        assert learner.stats() == taken
        assert learner.status().runs == ["default"]
        assert learner.read(7) == 0.0

        with pytest.raises(WindowFull, match="reports that its disk does not take its state"):
            for _ in range(9):
                actor.push([1, 2])
        with pytest.raises(FlushTimeout, match="reports that its disk does not take its state"):
            actor.flush()
        assert learner.stats().batches == 9  # counted in memory

        disk.work(daemon)
        wait_until(lambda: learner.status().state == "kept")
        actor.push([3], timeout=10)
        actor.flush(10)
        answer = learner.cotune(0)
        assert (answer.fresh, answer.owner) == (True, True)
        assert learner.stats().updates == 1
        assert learner.cotune(1).step == 1

        failures = daemon.events("state not written")
        assert {failure["level"] for failure in failures} == {"error"}
        assert len(failures) <= 3  # not one a try
        assert len(daemon.events("state written again")) >= 1
        before = learner.stats()
        daemon.kill()
        daemon.restart()
        assert learner.cotune(0).owner
        after = learner.stats()
        assert (after.batches, after.actions, after.updates) == (before.batches, before.actions, before.updates)
        assert after.batches == 10
    actor.close()


def test_a_last_commit_that_fails_is_said(start_daemon: Callable[..., DaemonProcess], disk: Disk) -> None:
    daemon = start_daemon(state={"directory": str(disk.folder)})
    with LearnerClient(daemon.endpoint) as learner:
        told = learner.cotune(0)
        disk.fail(daemon)
        actor = ActorClient(daemon.endpoint)
        actor.push([1])
        wait_until(lambda: learner.stats().batches == 1)
        assert daemon.terminate(timeout=20) == 1
        assert any("the last state was not written to" in str(line) for line in daemon.lines)
        assert not any("Traceback" in str(line) for line in daemon.lines)
        if disk.kind == "full":
            disk.work(daemon)
        daemon.restart()
        actor.flush(10)  # what was not durable is sent again
        assert learner.cotune(0) == told
        assert learner.stats().batches == 1
    actor.close()
