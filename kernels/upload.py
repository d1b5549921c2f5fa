"""A drain as the device gets it: the actions that count, and tables that leave the kernels nothing to decide.

Everything is packed into one buffer, so that a drain is one host-to-device copy. Needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .drain import ActionArray, Drain, Int64Array, Plan, Rejection, entropy_units

MAX_PIECE_ACTIONS = 61440
"""Most actions that one block counts: 240 for each of 256 threads, so that counters of 8 and 16 bits hold."""

RUN_FIELDS = (
    "row",
    "first_segment",
    "n_segments",
    "batches_train",
    "actions_train",
    "batches_prefill",
    "actions_prefill",
    "batches_rejected",
)
"""A touched run: bus row, its segments, and what its counters grow by. All int64."""

SEGMENT_FIELDS = (
    "first_piece",
    "n_pieces",
    "actions",
    "proposed",
    "rows",
    "row_entropy",
    "takes_pool",
    "complete",
)
"""A segment: its pieces, what it adds to the pool columns of those names, and the flags of `Plan`. All int64."""

RUN = np.dtype([(name, np.int64) for name in RUN_FIELDS])
SEGMENT = np.dtype([(name, np.int64) for name in SEGMENT_FIELDS])


def action_dtype(n_actions: int) -> type[np.uint8] | type[np.uint16]:
    """The type in which actions go to the device."""
    return np.uint8 if n_actions <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class Tables:
    """What the kernels are told of a drain; see ``action_entropy.cu``."""

    piece_start: Int64Array
    """[P + 1] first action of each piece, and the end of the last."""
    segments: npt.NDArray[np.void]
    """[S] `SEGMENT`"""
    runs: npt.NDArray[np.void]
    """[T] `RUN`"""

    @property
    def n_pieces(self) -> int:
        """Blocks that count."""
        return self.piece_start.size - 1

    @property
    def n_actions(self) -> int:
        """Actions that count."""
        return int(self.piece_start[-1])


def split(drain: Drain, max_batches: int, max_actions: int) -> Iterator[tuple[int, Drain]]:
    """Cuts a drain into smaller ones, each with the place of its first batch; taken one after the other they do the
    same, since what the first leaves in the pools the second takes out. A batch with more actions stays whole."""
    ends = np.cumsum(drain.lengths)
    first, n = 0, drain.lengths.size
    while first < n:
        begin = int(ends[first - 1]) if first else 0
        fits = int(np.searchsorted(ends, begin + max_actions, side="right"))
        stop = min(max(fits, first + 1), first + max_batches, n)
        yield first, drain if stop - first == n else _part(drain, first, stop, begin, int(ends[stop - 1]))
        first = stop


def _part(drain: Drain, first: int, stop: int, begin: int, end: int) -> Drain:
    batches, actions = slice(first, stop), slice(begin, end)
    return Drain(
        drain.actions[actions],
        drain.lengths[batches],
        drain.rows[batches],
        drain.prefill[batches],
        None if drain.proposed is None else drain.proposed[actions],
        None if drain.has_proposed is None else drain.has_proposed[batches],
        None if drain.row_entropy is None else drain.row_entropy[batches],
    )


def tabulate(drain: Drain, rejected: Sequence[Rejection], cut: Plan, piece_actions: int) -> Tables:
    """The tables of a drain.

    Args:
        drain: the batches.
        rejected: those that do not count.
        cut: the plan for those that do.
        piece_actions: most actions of a piece.
    """
    segments = _segments(drain, cut)
    segments["n_pieces"] = -(-segments["actions"] // piece_actions)
    last_piece = np.cumsum(segments["n_pieces"])
    segments["first_piece"] = last_piece - segments["n_pieces"]
    begin = np.cumsum(segments["actions"]) - segments["actions"]
    within = np.arange(int(segments["n_pieces"].sum())) - np.repeat(segments["first_piece"], segments["n_pieces"])
    starts = np.repeat(begin, segments["n_pieces"]) + piece_actions * within
    return Tables(np.append(starts, segments["actions"].sum()), segments, _runs(drain, rejected, cut))


def _segments(drain: Drain, cut: Plan) -> npt.NDArray[np.void]:
    segments = np.zeros(cut.segment_row.size, dtype=SEGMENT)
    if not segments.size:
        return segments
    first_batch = np.searchsorted(cut.segment_of_batch, np.arange(segments.size))
    lengths = drain.lengths[cut.batches]
    segments["actions"] = np.add.reduceat(lengths, first_batch)
    segments["takes_pool"], segments["complete"] = cut.takes_pool, cut.complete
    if drain.proposed is not None and drain.has_proposed is not None:
        told = drain.has_proposed[cut.batches]
        segments["proposed"] = np.add.reduceat(np.where(told, lengths, 0), first_batch)
    if drain.row_entropy is not None:
        entropy = drain.row_entropy[cut.batches]
        told = ~np.isnan(entropy)
        segments["rows"] = np.add.reduceat(np.where(told, lengths, 0), first_batch)
        segments["row_entropy"] = np.add.reduceat(entropy_units(np.where(told, entropy, 0.0)), first_batch)
    return segments


def _runs(drain: Drain, rejected: Sequence[Rejection], cut: Plan) -> npt.NDArray[np.void]:
    refused = drain.rows[[bad.batch for bad in rejected]]
    rows, lengths, prefill = drain.rows[cut.batches], drain.lengths[cut.batches], drain.prefill[cut.batches]
    touched = np.unique(np.concatenate((rows, refused)))
    runs = np.zeros(touched.size, dtype=RUN)
    runs["row"] = touched
    np.add.at(runs["batches_rejected"], np.searchsorted(touched, refused), 1)
    run_of_batch = np.searchsorted(touched, rows)
    for phase, name in ((~prefill, "train"), (prefill, "prefill")):
        np.add.at(runs[f"batches_{name}"], run_of_batch[phase], 1)
        np.add.at(runs[f"actions_{name}"], run_of_batch[phase], lengths[phase])
    run_of_segment = np.searchsorted(touched, cut.segment_row)
    np.add.at(runs["n_segments"], run_of_segment, 1)
    starts = np.flatnonzero(cut.takes_pool)  # a run's first segment takes its pool
    runs["first_segment"][run_of_segment[starts]] = starts
    return runs


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets in the buffer of a drain; each is a multiple of 16."""

    piece_start: int
    segments: int
    runs: int
    actions: int
    proposed: int
    """-1: no batch reported proposed actions."""
    size: int

    @classmethod
    def of(cls, tables: Tables, dtype: npt.DTypeLike) -> Layout:
        """The layout for these tables and actions of this type."""
        reported = bool(tables.segments["proposed"].any())
        sizes = [tables.piece_start.nbytes, tables.segments.nbytes, tables.runs.nbytes]
        sizes += [tables.n_actions * np.dtype(dtype).itemsize] * (1 + reported)
        offsets = np.cumsum([0] + [-(-size // 16) * 16 for size in sizes]).tolist()
        piece_start, segments, runs, actions, end = offsets[:5]
        return cls(piece_start, segments, runs, actions, end if reported else -1, offsets[-1])


def pack(
    buffer: npt.NDArray[np.uint8], layout: Layout, tables: Tables, drain: Drain, cut: Plan, dtype: npt.DTypeLike
) -> None:
    """Writes tables and actions into `buffer` as `layout` says."""
    _put(buffer, layout.piece_start, tables.piece_start, tables.piece_start.dtype)
    _put(buffer, layout.segments, tables.segments, SEGMENT)
    _put(buffer, layout.runs, tables.runs, RUN)
    keep = _kept_actions(drain, cut)
    executed = _put(buffer, layout.actions, drain.actions[keep], dtype)
    if layout.proposed < 0:
        return
    assert drain.proposed is not None
    assert drain.has_proposed is not None
    proposed = _put(buffer, layout.proposed, drain.proposed[keep], dtype)
    told = drain.has_proposed[cut.batches]
    if not told.all():  # a batch that reported nothing must not look overruled
        np.copyto(proposed, executed, where=np.repeat(~told, drain.lengths[cut.batches]))


def _kept_actions(drain: Drain, cut: Plan) -> slice | npt.NDArray[np.bool_]:
    keep = np.zeros(drain.lengths.size, dtype=np.bool_)
    keep[cut.batches] = True
    return slice(None) if bool(keep[drain.lengths > 0].all()) else np.repeat(keep, drain.lengths)


def _put(
    buffer: npt.NDArray[np.uint8], offset: int, values: ActionArray | npt.NDArray[np.void], dtype: npt.DTypeLike
) -> npt.NDArray[np.generic]:
    target = buffer[offset : offset + values.size * np.dtype(dtype).itemsize].view(dtype)
    np.copyto(target, values, casting="unsafe")
    return target
