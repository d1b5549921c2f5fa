"""A real daemon process on free ports of the loopback, for tests that talk to it over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

READY_SECONDS = 30


class DaemonProcess:
    """`cotuned serve` with the given settings; started at once."""

    module = "cotuned.service"
    """What is run with ``python -m``."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {
            "device": os.environ.get("TEST_DEVICE", "cpu"),  # "cuda": the same tests over a GPU
            "endpoints": dict.fromkeys(("actions", "queries", "watch"), "tcp://127.0.0.1:0"),
            "http": {"endpoint": "http://127.0.0.1:0"},
            "state": {"directory": str(folder / "state")},
            **settings,
        }
        self.lines: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Starts the process and waits until it says that it is ready."""
        file = self.folder / "cotuned.yaml"
        file.write_text(yaml.safe_dump(self.settings))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COTUNED_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "serve", "--config", str(file)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._ready = threading.Event()
        self._reader.start()
        if not self._ready.wait(READY_SECONDS):
            self.process.kill()
            raise AssertionError(f"the daemon was not ready within {READY_SECONDS} s; it said {self.lines}")

    def _read(self, stream: Any) -> None:
        for text in stream:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"event": "text", "text": text.rstrip()}
            self.lines.append(line)
            if line["event"] == "ready":
                endpoints = dict(line["endpoints"])  # a restart binds the same ports
                if "http" in endpoints:
                    self.settings["http"] = {**self.settings["http"], "endpoint": endpoints.pop("http")}
                self.settings["endpoints"] = endpoints
                self._ready.set()
        self._ready.set()  # ended: do not make anyone wait for the deadline

    @property
    def endpoint(self) -> str:
        """The queries endpoint."""
        return self.settings["endpoints"]["queries"]

    @property
    def endpoints(self) -> dict[str, str]:
        """All endpoints by name."""
        return self.settings["endpoints"]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event so far."""
        return [line for line in self.lines if line["event"] == event]

    def terminate(self, number: int = signal.SIGTERM, timeout: float = 10) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """SIGKILL."""
        self.terminate(signal.SIGKILL)

    def restart(self) -> None:
        """Starts it again on the same ports and with the same state directory."""
        self.start()


def wait_until(condition: Any, timeout: float = 10) -> None:
    """Returns when `condition()` is true; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout} s"
        time.sleep(0.01)
