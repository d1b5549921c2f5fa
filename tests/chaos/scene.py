"""What every fault needs: a folder, a daemon in it, sometimes a machine that misbehaves, and an end that tidies up."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.daemon_process import DaemonProcess

from . import lockstep
from .outcome import Outcome


class CannotTry(Exception):
    """This machine lacks what the fault needs; the message says what."""


class FailingGpu(DaemonProcess):
    """A daemon whose GPU fails on SIGUSR1."""

    module = "tests.chaos.failing_gpu"


@contextlib.contextmanager
def folder() -> Generator[Path, None, None]:
    """A folder of its own, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="cotuned-chaos-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def daemon_in(
    path: Path, kind: type[DaemonProcess] = DaemonProcess, **settings: Any
) -> Generator[DaemonProcess, None, None]:
    """A daemon that runs in a folder; killed at the end if it still runs."""
    path.mkdir(exist_ok=True)
    daemon = kind(path, **settings)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Generator[Path, None, None]:
    """A file system of its own of a few megabytes, at `path`."""
    path.mkdir()
    options = f"size={megabytes}m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "cotuned-chaos", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        raise CannotTry(f"mount needs root here ({mounted.stderr.strip()})")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def fill(disk: Path) -> Path:
    """Takes all the room there is; the file that has it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@contextlib.contextmanager
def misbehaving(path: Path, **variables: str) -> Generator[None, None, None]:
    """Daemons that start within this get interpose.c and its variables."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotTry("interpose.c needs a C compiler")
    library, source = path / "interpose.so", Path(__file__).with_name("interpose.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    before = dict(os.environ)
    os.environ.update(LD_PRELOAD=str(library), **variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def strike(outcome: Outcome, script: lockstep.InThread, times: int, fault: Callable[[int], None]) -> None:
    """Makes a fault `times` times, at random moments of a script under way."""
    moments = random.Random(583)
    script.wait_for_progress()
    for time_number in range(times):
        time.sleep(moments.uniform(0.0, 0.4))
        begun = time.monotonic()
        fault(time_number)
        script.wait_for_progress()
        outcome.recovered.append(time.monotonic() - begun)
        outcome.times += 1


def compare_with_calm(outcome: Outcome, book: lockstep.Book, path: Path, **settings: Any) -> None:
    """Books a script that ran under faults and compares it, bit by bit, with the same script on a daemon left alone."""
    with daemon_in(path / "calm", **settings) as daemon:
        calm = lockstep.run(daemon.endpoint, book.steps)
    outcome.book(book.sent, book.counters["batches_train"] + book.counters["batches_prefill"], book.sent)
    outcome.wrong += lockstep.differences(book, calm)
    outcome.notes.append(f"{book.steps:,} steps bit-equal")


def resident(pids: list[int]) -> Iterator[float]:
    """MiB of resident memory of each process."""
    for pid in pids:
        yield psutil.Process(pid).memory_info().rss / 2**20
