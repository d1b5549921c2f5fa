"""Limits that were set before anything was measured (design §7 and the issues), and whether a run met them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """What was measured beside what it had to be."""

    what: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """Whether the limit is a lower one."""

    @property
    def met(self) -> bool:
        """False for NaN too."""
        return math.isfinite(self.value) and (self.value >= self.limit if self.at_least else self.value <= self.limit)

    def as_json(self) -> dict[str, Any]:
        """For the file beside the table."""
        side = "at least" if self.at_least else "at most"
        return {"what": self.what, "value": self.value, side: self.limit, "unit": self.unit, "met": self.met}

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        return (
            f"{'met' if self.met else 'NOT met':8} {self.what:58} {self.value:9.2f} {self.unit}, {side} {self.limit:g}"
        )


def shown(value: float | str | None) -> str:
    """A cell of a table: a name as it is, what was not measured as a dash."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"
