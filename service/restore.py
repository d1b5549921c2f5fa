"""From what a state file holds to open runs and streams."""

from __future__ import annotations

from .runs import Runs
from .snapshot import Stored
from .streams import Streams


def restore(stored: Stored, runs: Runs, streams: Streams, guarded: bool) -> None:
    """Opens every run and stream as it was written. The file was checked: every stream is counted by one run.

    Streams belong to the keys that opened them only where there are keys (`guarded`): without CURVE nobody has one.
    """
    records = {record.number: record if guarded else record._replace(owner=None) for record in stored.streams}
    for record in stored.runs:
        run = runs.restore(record)
        for number, last in record.streams.T.tolist():
            streams.restore(records[number], run, last)
