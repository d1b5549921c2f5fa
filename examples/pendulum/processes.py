"""The demo's child processes: started together, watched, and stopped together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_STOP_SECONDS = 3.0
_SHOWN_CHARACTERS = 4000


class ChildDied(RuntimeError):
    """A child process ended although it was still needed, or with an error."""


class Children:
    """Python processes whose output goes to files, one pair a child.

    Use as a context manager: whatever way the block is left, no child is left behind.

    Args:
        folder: where the files go: ``NAME.out`` and ``NAME.err``.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files: list[IO[bytes]] = []

    def start(self, name: str, arguments: Sequence[str | Path]) -> None:
        """Starts ``python arguments…`` in a session of its own, so that Ctrl-C reaches this process only."""
        # One thread in each process: ten processes share a few cores, and the networks are too small for more.
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # The demo's daemon is set up by the demo's file alone.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTUNED_")}
        files = [open(self._folder / f"{name}.{end}", "wb") for end in ("out", "err")]  # noqa: SIM115
        self._files += files
        self._processes[name] = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            env=inherited | threads,
            start_new_session=True,
        )

    def output(self, name: str) -> Path:
        """The file with what the child printed."""
        return self._folder / f"{name}.out"

    def has_ended(self, name: str) -> bool:
        """Whether the child ended well; a child that failed raises.

        Raises:
            ChildDied: it ended with an error; the message has the end of its standard error.
        """
        code = self._processes[name].poll()
        if code not in (None, 0):
            raise ChildDied(f"{name} ended with exit code {code}; its last words were\n{self._last_words(name)}")
        return code == 0

    def check(self, needed: Sequence[str] = ()) -> None:
        """Raises `ChildDied` if any child failed, or if one that is still needed has ended at all."""
        for name in self._processes:
            if self.has_ended(name) and name in needed:
                raise ChildDied(f"{name} ended too early; its last words were\n{self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        text = (self._folder / f"{name}.err").read_text("utf-8", "replace").strip()
        return text[-_SHOWN_CHARACTERS:] or "(nothing)"

    def stop(self) -> None:
        """Ends all children: SIGTERM, then after a few seconds SIGKILL."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._signal_all(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        for file in self._files:
            file.close()

    def _signal_all(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_endpoints(count: int) -> list[str]:
    """Loopback endpoints whose ports are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    finally:
        for s in sockets:
            s.close()
