"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts real daemons with the settings given; stops them at the end."""
    daemons: list[DaemonProcess] = []

    def start(**settings: object) -> DaemonProcess:
        folder = tmp_path / f"daemon{len(daemons)}"
        folder.mkdir()
        daemon = DaemonProcess(folder, **settings)  # type: ignore[arg-type]
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.kill()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """One real daemon with default settings, on free ports, in NumPy."""
    return start_daemon()
