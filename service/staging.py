"""Collects the batches of one drain and lays them out for the bus: batches of one run together, in order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..kernels import Drain
from ..wire.codec import Batch, action_dtype
from .streams import Stream

Staged = tuple[Stream, Batch]


class Staging:
    """The batches of one drain.

    Args:
        n_actions: K, which decides the width of an index on the wire.
    """

    def __init__(self, n_actions: int) -> None:
        self._dtype = action_dtype(n_actions)
        self._staged: list[Staged] = []

    def __len__(self) -> int:
        return len(self._staged)

    def add(self, stream: Stream, batch: Batch) -> None:
        """Appends a batch that was taken from its stream."""
        self._staged.append((stream, batch))

    def take(self) -> tuple[Drain, list[Staged]]:
        """The drain and, place by place, the batches it was made of; the staging is empty afterwards."""
        staged, self._staged = self._staged, []
        # Stable, so the order of arrival within a run stays.
        staged.sort(key=_row_of)
        itemsize = self._dtype.itemsize
        lengths = np.array([len(batch.executed) // itemsize for _, batch in staged], dtype=np.int64)
        executed = self._join(batch.executed for _, batch in staged)
        proposed = has_proposed = row_entropy = None
        if any(batch.proposed is not None for _, batch in staged):
            # Zeros stand in for what was not reported; `has_proposed` keeps them out of every count.
            proposed = self._join(
                bytes(len(batch.executed)) if batch.proposed is None else batch.proposed for _, batch in staged
            )
            has_proposed = np.array([batch.proposed is not None for _, batch in staged])
        if any(batch.row_entropy is not None for _, batch in staged):
            row_entropy = np.array(
                [math.nan if batch.row_entropy is None else batch.row_entropy for _, batch in staged]
            )
        drain = Drain(
            actions=executed,
            lengths=lengths,
            rows=np.array([stream.run.row for stream, _ in staged], dtype=np.int64),
            prefill=np.array([batch.phase == 1 for _, batch in staged], dtype=np.bool_),
            proposed=proposed,
            has_proposed=has_proposed,
            row_entropy=row_entropy,
        )
        return drain, staged

    def _join(self, parts: Iterable[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(parts), dtype=self._dtype)


def _row_of(staged: Staged) -> int:
    return staged[0].run.row
