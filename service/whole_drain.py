"""`take_whole`: takes a drain as a whole where nothing in it is out of the ordinary, which is nearly always.

Each batch is then the next one of its stream, so that judging them one by one would only have said so. Anything else (a
duplicate, a gap, an unknown stream, a frame that is malformed or of a rare kind) makes it return None with nothing
taken, and the engine goes through the frames one by one, where those cases stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import Drain
from ..wire.batch_table import BatchTable, Int64Array, decode_batches
from .streams import Stream, Streams

ActionType = np.dtype[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class WholeDrain:
    """A drain whose batches were all taken from their streams."""

    drain: Drain
    streams: list[Stream]
    """Those that it has batches of."""
    stream_of_batch: Int64Array
    """[B] place in `streams`."""
    sequence: Int64Array
    """[B] number of the batch in its stream."""

    def batch(self, place: int) -> tuple[Stream, int]:
        """Stream and number of a batch."""
        return self.streams[int(self.stream_of_batch[place])], int(self.sequence[place])


def take_whole(frames: list[bytes], streams: Streams, dtype: ActionType) -> WholeDrain | None:
    """Takes all batches of these frames, or none.

    Args:
        frames: as they came over the wire, in order of arrival; from anybody, so only where streams have no owners.
        streams: the open ones.
        dtype: of an action index on the wire.
    """
    table = decode_batches(frames, dtype.itemsize)
    if table is None:
        return None
    numbers, stream_of_batch = _distinct(table.stream)
    found = [streams.get(number) for number in numbers]
    known = [stream for stream in found if stream is not None and stream.owner is None]
    if len(known) < len(found):
        return None
    counts = np.bincount(stream_of_batch, minlength=len(known))
    last = np.array([stream.last for stream in known], dtype=np.int64)
    # In order of arrival within each stream, the numbers must go on from its last one, each by one.
    by_stream = np.argsort(stream_of_batch, kind="stable") if len(known) > 1 else slice(None)
    rank = np.arange(len(frames)) - np.repeat(np.cumsum(counts) - counts, counts)
    if not (table.sequence[by_stream] == np.repeat(last, counts) + 1 + rank).all():
        return None
    for stream, count in zip(known, counts.tolist(), strict=True):
        stream.took(count)
    rows = np.array([stream.run.row for stream in known], dtype=np.int64)[stream_of_batch]
    # Stable, so the order of arrival within a run stays.
    order = None if (rows == rows[0]).all() else np.argsort(rows, kind="stable")
    drain = _drain_of(table, rows, order, dtype)
    if order is None:
        return WholeDrain(drain, known, stream_of_batch, table.sequence)
    return WholeDrain(drain, known, stream_of_batch[order], table.sequence[order])


def _distinct(values: Int64Array) -> tuple[list[int], Int64Array]:
    if (values == values[0]).all():
        return [int(values[0])], np.zeros(values.size, dtype=np.int64)
    distinct, place = np.unique(values, return_inverse=True)
    return distinct.tolist(), place


def _drain_of(table: BatchTable, rows: Int64Array, order: Int64Array | None, dtype: ActionType) -> Drain:
    has_proposed = proposed = None
    if table.proposed is not None:
        has_proposed = np.array([given is not None for given in table.proposed])
        # Zeros stand in for what was not reported; `has_proposed` keeps them out of every count.
        filled: list[bytes] = [
            bytes(length) if given is None else given
            for given, length in zip(table.proposed, table.lengths.tolist(), strict=True)
        ]
        proposed = _joined(filled, order, dtype)
    lengths, prefill, row_entropy = table.lengths // dtype.itemsize, table.prefill, table.row_entropy
    if isinstance(table.executed, bytes):
        actions = np.frombuffer(table.executed, dtype)
        if order is not None:
            actions = actions.reshape(order.size, -1)[order].reshape(-1)
    else:
        actions = _joined(table.executed, order, dtype)
    if order is not None:
        rows, lengths, prefill = rows[order], lengths[order], prefill[order]
        has_proposed = None if has_proposed is None else has_proposed[order]
        row_entropy = None if row_entropy is None else row_entropy[order]
    return Drain(actions, lengths, rows, prefill, proposed, has_proposed, row_entropy)


def _joined(parts: list[bytes], order: Int64Array | None, dtype: ActionType) -> npt.NDArray[np.unsignedinteger[Any]]:
    if order is not None:
        places: list[int] = order.tolist()
        parts = [parts[place] for place in places]
    return np.frombuffer(b"".join(parts), dtype)
