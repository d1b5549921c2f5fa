"""What a daemon holds of a run, read over the wire, for tests that compare two of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cotuned.client import LearnerClient
from cotuned.wire.slots import FIRST_OWNED_SLOT, LAST_OWNED_SLOT, Slot

SLOTS = (7, int(Slot.RL_POLICY_ENTROPY_EMA_INDEX), *range(FIRST_OWNED_SLOT, LAST_OWNED_SLOT + 1))
"""One of the user's, and all of the daemon's."""

_OF_THE_TRANSPORT = ("batches_duplicate", "batches_early", "actors")
"""Counters that differ where batches came twice or too early: the price of faults."""


def slot_bits(learner: LearnerClient) -> bytes:
    """`SLOTS` of the client's run, as float32, bit for bit."""
    return np.array([learner.read(slot) for slot in SLOTS], dtype=np.float32).tobytes()


def counters(learner: LearnerClient) -> dict[str, Any]:
    """Every counter of the run but those that count what the transport does."""
    stats = learner.stats()
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__ if name not in _OF_THE_TRANSPORT}
