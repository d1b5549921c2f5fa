"""The live table: both runs side by side, from what the learners print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Progress = Mapping[str, Any]

_ROWS = (
    ("episode return", "episode_return", "{:.0f}"),
    ("policy entropy (slot 420), nats", "policy_entropy", "{:.3f}"),
    ("executed entropy (slot 583), nats", "entropy", "{:.3f}"),
    ("executed given the state E_s[H], nats", "conditional_entropy", "{:.3f}"),
    ("target, nats", "target_entropy", "{:.3f}"),
    ("gate rate", "gate_rate", "{:.0%}"),
    ("α", "alpha", "{:.4f}"),
    ("τ", "tau", "{:.4f}"),
    ("daemon", "reason", "{}"),
)


class ProgressFile:
    """Follows the JSON lines that a learner prints into a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.latest: Progress = {}
        """The newest whole line; empty before the first."""

    def read(self) -> None:
        """Takes what was added since the last call; a line that is only half there waits for the next."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.splitlines()
        if lines:
            self.latest = json.loads(lines[-1])


def progress_table(runs: Sequence[str], latest: Mapping[str, Progress]) -> Table:
    """One column a run, one row a number."""
    table = Table(title="the same training, tuned from two slots", title_justify="left", min_width=100)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run, ratio=1)
    table.add_row("learner step", *(_step(latest[run]) for run in runs))
    for label, key, pattern in _ROWS:
        table.add_row(label, *(_shown(latest[run].get(key), pattern) for run in runs))
    return table


def progress_line(run: str, progress: Progress) -> str:
    """The same in one line, for output that goes to a file."""
    numbers = ", ".join(f"{label} {_shown(progress.get(key), pattern)}" for label, key, pattern in _ROWS[:-1])
    return f"{run}: step {_step(progress)}, {numbers}"


def _step(progress: Progress) -> str:
    return f"{progress['step']:.0f} of {progress['steps']}" if progress else "prefill"


def _shown(value: Any, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)
