"""The protocol's version and its fixed limits, apart from the package's version."""

from __future__ import annotations

import re

PROTOCOL_VERSION = 1
"""First element of every frame. Raised when an older peer could misread a frame, and only then."""

MIN_ACTIONS = 2
MAX_ACTIONS = 4096
"""Bounds of K: one action leaves nothing to tune; the entropy kernel keeps counters for at most 4096 bins on chip."""

MAX_SEQUENCE = 2**63 - 1
"""Largest batch number, learner step and counter: what int64 holds."""

DEFAULT_RUN = "default"

ENDPOINT_VARIABLE = "COTUNED_ENDPOINT"
"""Environment variable that names the daemon's queries endpoint, for clients and the command line."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,63}")
"""Names of runs, actors and slots: 1 to 64 of letters, digits, ``_ . - /``, not beginning with ``. - /``."""


def check_name(kind: str, name: object) -> None:
    """Raises ValueError with a sentence if `name` cannot name a `kind` ("run", "actor", "slot")."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{kind} name {name!r:.80} cannot be used: 1 to 64 of letters, digits, '_', '.', '-', '/' are allowed, "
            "beginning with a letter, a digit or '_'"
        )
