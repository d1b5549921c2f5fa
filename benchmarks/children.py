"""Child processes of a benchmark: none outlives it, and every wait for one has an end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_SHOWN_CHARACTERS = 2000


def _die_with_the_parent() -> None:
    """In the child: SIGKILL when the benchmark is gone, even if that was killed without a chance to clean up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Children:
    """Python processes whose output goes to files. Use as a context manager: whatever happens, none is left behind.

    Args:
        folder: where the files go, ``NAME.out`` and ``NAME.err``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._files: list[IO[bytes]] = []

    def start(self, name: str, *arguments: str, **environment: str) -> int:
        """Starts ``python arguments…``; returns its process id. A name may be used again once its child was stopped."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTUNED_")}
        files = [open(self._folder / f"{name}.{end}", "wb") for end in ("out", "err")]  # noqa: SIM115
        self._files += files
        self._processes[name] = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            env=inherited | {"PYTHONUNBUFFERED": "1"} | environment,
            preexec_fn=_die_with_the_parent,
        )
        return self._processes[name].pid

    def text(self, name: str, end: str) -> str:
        """What the child has written to standard output (``out``) or standard error (``err``)."""
        return (self._folder / f"{name}.{end}").read_text("utf-8", "replace")

    def wait_for(self, name: str, found: Callable[[], Any], timeout: float) -> Any:
        """What `found` returns once it is not None.

        Raises:
            SystemExit: the child ended, or `timeout` seconds were over; with the child's last words.
        """
        deadline = time.monotonic() + timeout
        while (value := found()) is None:
            ended = self._processes[name].poll()
            if ended is not None or time.monotonic() > deadline:
                what = f"ended with exit code {ended}" if ended is not None else f"did not answer within {timeout:g} s"
                raise SystemExit(f"{name} {what}; it said\n{self.text(name, 'err')[-_SHOWN_CHARACTERS:]}")
            time.sleep(0.002)
        return value

    def stop(self, name: str) -> None:
        """SIGTERM, after 5 s SIGKILL; returns when the child is gone."""
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def __enter__(self) -> Children:
        # Else SIGTERM (from make, from timeout) would end this process without leaving the `with`.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(10)
        for file in self._files:
            file.close()
