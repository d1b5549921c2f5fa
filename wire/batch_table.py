"""`decode_batches`: a whole drain of batch frames at once. It takes what is ordinary, and nothing else.

Frames of one length whose numbers have the same widths differ in their values only, so the frames of each length become
one table of bytes and each field of all of them one slice of it. What is not like that (a frame of another layout among
those of its length, actions in GPU memory, whatever `codec.decode_batch` would refuse) makes it return None, and the
caller decodes frame by frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .codec import BATCH_FIELDS
from .protocol import MAX_SEQUENCE, PROTOCOL_VERSION

MIN_FRAMES = 16
"""Fewer frames of one length are not worth a table."""

ByteTable = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_ARRAY = 0x90 | BATCH_FIELDS
_NIL, _FLOAT64 = 0xC0, 0xCB
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""Bytes behind a msgpack marker of an unsigned integer; below 0x80 the marker is the number."""
_BINARY = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Bytes of the length behind a msgpack marker of bin."""


@dataclass(frozen=True, slots=True)
class BatchTable:
    """B decoded batches in the order of their frames: `codec.Batch` by columns."""

    stream: Int64Array
    sequence: Int64Array
    prefill: npt.NDArray[np.bool_]
    """Each [B]."""
    lengths: Int64Array
    """[B] bytes of `executed`."""
    executed: list[bytes] | bytes
    """One a batch; or, where all are as long, all of them joined."""
    proposed: list[bytes | None] | None
    """One a batch; None: no batch reported any."""
    row_entropy: npt.NDArray[np.float64] | None
    """[B], NaN where not reported; None: no batch reported it."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the fields of a frame lie. `markers` are the places of the bytes that make it so."""

    markers: list[int]
    numbers: list[slice]
    """Stream, sequence and step: where their values lie."""
    is_marker: list[bool]
    """Of each, whether it is below 0x80, so that its marker is its value."""
    phase: int
    executed: slice
    proposed: slice | None
    row_entropy: slice | None


def decode_batches(frames: list[bytes], index_bytes: int) -> BatchTable | None:
    """The batches of the frames, in their order; None if one of them is not ordinary (see the module).

    Args:
        frames: as they came over the wire.
        index_bytes: bytes of one action index.
    """
    sizes = np.fromiter(map(len, frames), np.int64, len(frames))
    kinds = [int(sizes[0])] if (sizes == sizes[0]).all() else np.unique(sizes).tolist()
    if len(kinds) * MIN_FRAMES > len(frames):
        return None
    n = len(frames)
    stream, sequence, lengths = (np.empty(n, np.int64) for _ in range(3))
    prefill = np.empty(n, np.bool_)
    row_entropy = np.full(n, np.nan)
    executed: list[bytes] | bytes = [b""] * n
    proposed: list[bytes | None] = [None] * n
    reported = False
    for size in kinds:
        places = np.flatnonzero(sizes == size) if len(kinds) > 1 else np.arange(n)
        mine = [frames[place] for place in places.tolist()] if len(kinds) > 1 else frames
        layout = _layout_of(mine[0], index_bytes)
        if layout is None:
            return None
        table = np.frombuffer(b"".join(mine), np.uint8).reshape(len(mine), size)
        numbers = _numbers(table, layout)
        if numbers is None:
            return None
        stream[places], sequence[places], prefill[places] = numbers
        lengths[places] = layout.executed.stop - layout.executed.start
        if len(kinds) == 1:
            executed = table[:, layout.executed].tobytes()
        else:
            assert isinstance(executed, list)
            for place, frame in zip(places.tolist(), mine, strict=True):
                executed[place] = frame[layout.executed]
        if layout.proposed is not None:
            reported = True
            for place, frame in zip(places.tolist(), mine, strict=True):
                proposed[place] = frame[layout.proposed]
        if layout.row_entropy is not None:
            values = _big_endian(table, layout.row_entropy, ">f8").astype(np.float64)
            if np.isnan(values).any():
                return None
            row_entropy[places] = values
    return BatchTable(
        stream,
        sequence,
        prefill,
        lengths,
        executed,
        proposed if reported else None,
        None if np.isnan(row_entropy).all() else row_entropy,
    )


def _numbers(table: ByteTable, layout: _Layout) -> tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]] | None:
    """(stream, sequence, prefill) of the rows; None if one has another layout, or a number that is not allowed."""
    if not (table[:, layout.markers] == table[0, layout.markers]).all():
        return None
    phase = table[:, layout.phase]
    numbers: list[Int64Array] = []
    for place, is_marker in zip(layout.numbers, layout.is_marker, strict=True):
        values = _big_endian(table, place, f">u{place.stop - place.start}")
        if (values > (0x7F if is_marker else MAX_SEQUENCE)).any():
            return None
        numbers.append(values.astype(np.int64))
    stream, sequence, _ = numbers
    if (phase > 1).any() or (sequence == 0).any():
        return None
    return stream, sequence, phase == 1


def _big_endian(table: ByteTable, place: slice, dtype: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(table[:, place]).view(dtype)[:, 0]


def _layout_of(frame: bytes, index_bytes: int) -> _Layout | None:
    """Where the fields lie; None if the frame is not ordinary."""
    if frame[:2] != bytes((_ARRAY, PROTOCOL_VERSION)):
        return None
    markers, at = [0, 1], 2
    places: list[slice] = []
    is_marker: list[bool] = []
    try:
        for field in ("stream", "sequence", "phase", "step"):
            width = _UNSIGNED.get(frame[at], 0)
            if (width == 0 and frame[at] > 0x7F) or (field == "phase" and width):
                return None
            if width:
                markers.append(at)
            places.append(slice(at + 1, at + 1 + width) if width else slice(at, at + 1))
            is_marker.append(width == 0)
            at = places[-1].stop
        executed = _binary(frame, at, markers)
        if executed is None:
            return None
        length = executed.stop - executed.start
        at = executed.stop
        proposed = None
        if frame[at] == _NIL:
            markers.append(at)
            at += 1
        else:
            proposed = _binary(frame, at, markers)
            if proposed is None or proposed.stop - proposed.start != length:
                return None
            at = proposed.stop
        markers.append(at)
        row_entropy = slice(at + 1, at + 9) if frame[at] == _FLOAT64 else None
        at += 1 if row_entropy is None else 9
        ordinary = row_entropy is not None or frame[markers[-1]] == _NIL
    except IndexError:  # it ends too early
        return None
    if not ordinary or at != len(frame) or length % index_bytes:
        return None
    phase = places.pop(2).start
    del is_marker[2]
    return _Layout(markers, places, is_marker, phase, executed, proposed, row_entropy)


def _binary(frame: bytes, at: int, markers: list[int]) -> slice | None:
    """Where the bytes of a bin lie whose marker is at `at`; its marker and length join `markers`."""
    width = _BINARY.get(frame[at])
    if width is None:
        return None
    begin = at + 1 + width
    length = int.from_bytes(frame[at + 1 : begin], "big")
    markers.extend(range(at, begin))
    return slice(begin, begin + length) if begin + length <= len(frame) else None
