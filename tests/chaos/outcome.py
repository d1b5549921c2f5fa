"""What one fault did to the books: sent, applied, durable, lost, counted twice, and how long until all was well."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass
class Outcome:
    """One row of the table. Batches are counted over all times that the fault was tried."""

    fault: str
    times: int = 0
    """How often the fault happened."""
    sent: int = 0
    """Batches for which `push` returned, of actors that lived to flush."""
    applied: int = 0
    """Batches in the daemon's counters at the end."""
    durable: int = 0
    """Batches that the daemon confirmed as durable."""
    lost: int = 0
    counted_twice: int = 0
    recovered: list[float] = field(default_factory=list)
    """Seconds from each fault to the next confirmed batch or answer."""
    wrong: list[str] = field(default_factory=list)
    """Whatever else was not as promised; empty: all was."""
    notes: list[str] = field(default_factory=list)
    """Figures and ways of trying that the table has no column for."""
    skipped: str = ""
    """Why the fault could not be tried here."""

    def book(self, sent: int, applied: int, durable: int) -> None:
        """Adds what one scene sent and what its daemon has."""
        self.sent += sent
        self.applied += applied
        self.durable += durable
        self.lost += max(0, sent - applied)
        self.counted_twice += max(0, applied - sent)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Notes what is wrong unless `holds`."""
        if not holds:
            self.wrong.append(otherwise)

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.counted_twice or self.wrong)

    def as_json(self) -> dict[str, Any]:
        """For the file beside the table."""
        return {**asdict(self), "good": self.good}


def print_table(outcomes: list[Outcome]) -> None:
    """The table of `make chaos`."""
    table = Table(title="faults, and what became of the batches")
    for name in (
        "fault",
        "times",
        "sent",
        "applied",
        "durable",
        "lost",
        "counted twice",
        "recovery s, median / max",
        "",
    ):
        table.add_column(name, justify="left" if name in ("fault", "") else "right")
    for outcome in outcomes:
        if outcome.skipped:
            table.add_row(outcome.fault, "–", *["–"] * 6, f"not tried: {outcome.skipped}")
            continue
        took = outcome.recovered
        recovery = f"{statistics.median(took):.2f} / {max(took):.2f}" if took else "–"
        numbers = (outcome.times, outcome.sent, outcome.applied, outcome.durable, outcome.lost, outcome.counted_twice)
        verdict = "; ".join(outcome.wrong) or "; ".join(["good", *outcome.notes])
        table.add_row(outcome.fault, *[f"{n:,}" for n in numbers], recovery, verdict)
    Console(width=170).print(table)
