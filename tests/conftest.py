"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what starts daemons: a GPU run repeats those tests over a CUDA bus."""
    for item in items:
        if "start_daemon" in getattr(item, "fixturenames", ()):
            item.add_marker("daemon")


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


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, where it finds a GPU."""
    module = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no GPU: {error}")
    return module


@pytest.fixture(scope="session")
def torch(cupy: Any) -> Any:
    """torch, where it finds a GPU."""
    module = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    if not module.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return module
