"""`decode_batches` says what `decode_batch` says of every frame, or nothing at all."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotuned.wire import Batch, DeviceBatch, decode_batch, encode_batch
from cotuned.wire.batch_table import MIN_FRAMES, BatchTable, decode_batches
from cotuned.wire.errors import FrameError
from cotuned.wire.protocol import MAX_SEQUENCE, PROTOCOL_VERSION

EDGES = (0, 1, 2**7 - 1, 2**7, 2**8 - 1, 2**8, 2**16 - 1, 2**16, 2**32 - 1, 2**32, MAX_SEQUENCE)
numbers = st.sampled_from(EDGES) | st.integers(0, MAX_SEQUENCE)


def one_by_one(frames: list[bytes], index_bytes: int = 1) -> list[Batch]:
    batches = [decode_batch(frame, index_bytes) for frame in frames]
    assert all(isinstance(batch, Batch) for batch in batches)
    return [batch for batch in batches if isinstance(batch, Batch)]


def rows(table: BatchTable) -> list[Batch]:
    """The batches of a table, without their steps (the table has none)."""
    n = table.lengths.size
    ends = np.cumsum(table.lengths).tolist()
    executed = table.executed
    if isinstance(executed, bytes):
        executed = [executed[end - length : end] for end, length in zip(ends, table.lengths.tolist(), strict=True)]
    proposed = table.proposed or [None] * n
    entropies = [math.nan] * n if table.row_entropy is None else table.row_entropy.tolist()
    return [
        Batch(
            int(table.stream[place]),
            int(table.sequence[place]),
            int(table.prefill[place]),
            0,
            executed[place],
            proposed[place],
            None if math.isnan(entropies[place]) else entropies[place],
        )
        for place in range(n)
    ]


def same(frames: list[bytes], index_bytes: int = 1) -> BatchTable:
    table = decode_batches(frames, index_bytes)
    assert table is not None
    expected = one_by_one(frames, index_bytes)
    assert rows(table) == [batch._replace(step=0) for batch in expected]
    assert table.lengths.tolist() == [len(batch.executed) for batch in expected]
    return table


def test_a_drain_of_like_batches_is_one_table() -> None:
    table = same([encode_batch(Batch(7, n, n % 2, n, bytes([n % 11] * 64))) for n in range(1, 128)])
    assert isinstance(table.executed, bytes)  # nothing was copied batch by batch
    assert table.proposed is None
    assert table.row_entropy is None


@pytest.mark.parametrize("stream", EDGES)
@pytest.mark.parametrize("first", [edge for edge in EDGES if 0 < edge < MAX_SEQUENCE - 2 * MIN_FRAMES])
def test_numbers_of_every_width(stream: int, first: int) -> None:
    frames = [encode_batch(Batch(stream, first, 0, step, b"abcd")) for step in EDGES for _ in range(MIN_FRAMES)]
    by_length: dict[int, set[bytes]] = {}
    for frame in frames:
        by_length.setdefault(len(frame), set()).add(frame)
    for alike in by_length.values():
        same([frame for frame in alike for _ in range(MIN_FRAMES)])


@pytest.mark.parametrize("index_bytes", [1, 2])
def test_several_sizes_and_reports_in_one_drain(index_bytes: int) -> None:
    frames = []
    for n in range(1, 200):
        executed = bytes(range(200))[: (10, 40, 100)[n % 3] * index_bytes]
        proposed = executed[::-1] if n % 2 else None
        frames.append(encode_batch(Batch(2**40, 300 + n, 0, 300, executed, proposed, n / 8 if n % 5 else None)))
    table = same(frames, index_bytes)
    assert table.proposed is not None
    assert table.row_entropy is not None


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536])
def test_bin_lengths_of_every_width(length: int) -> None:
    same([encode_batch(Batch(1, n, 0, 0, bytes(length))) for n in range(1, 1 + MIN_FRAMES)])


def ordinary(n: int = 4 * MIN_FRAMES) -> list[Batch]:
    return [Batch(5, number, 0, 1, bytes(range(8)), bytes(range(8)), 2.5) for number in range(1, 1 + n)]


def packed(batch: Batch, **fields: object) -> bytes:
    return bytes(msgpack.packb((PROTOCOL_VERSION, *({**batch._asdict(), **fields}).values())))


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(encode_batch(DeviceBatch(5, 1, 0, 1, 0, 8, 1)), id="actions in GPU memory"),
        pytest.param(packed(ordinary()[0], executed="abcdefgh"), id="text"),
        pytest.param(packed(ordinary()[0], sequence=0), id="number 0"),
        pytest.param(packed(ordinary()[0], sequence=-1), id="negative number"),
        pytest.param(packed(ordinary()[0], stream=2**63), id="stream beyond 2^63 - 1"),
        pytest.param(packed(ordinary()[0], phase=2), id="no phase"),
        pytest.param(packed(ordinary()[0], phase=True), id="phase true"),
        pytest.param(packed(ordinary()[0], step=1.0), id="step a float"),
        pytest.param(packed(ordinary()[0], proposed=b"short"), id="proposed of another length"),
        pytest.param(packed(ordinary()[0], row_entropy=math.nan), id="NaN"),
        pytest.param(packed(ordinary()[0], row_entropy=1), id="entropy an integer"),
        pytest.param(b"\x98\x02" + encode_batch(ordinary()[0])[2:], id="another version"),
        pytest.param(b"\x98\xc3" + encode_batch(ordinary()[0])[2:], id="version true"),
        pytest.param(b"\x97\x01" + encode_batch(ordinary()[0])[2:], id="fewer fields"),
        pytest.param(encode_batch(ordinary()[0]) + b"\x00", id="a byte too many"),
        pytest.param(encode_batch(ordinary()[0])[:-1], id="a byte short"),
        pytest.param(b"", id="nothing"),
    ],
)
@pytest.mark.parametrize("place", [0, 17, -1])
def test_one_odd_frame_and_the_caller_decodes_them_one_by_one(odd: bytes, place: int) -> None:
    frames = [encode_batch(batch) for batch in ordinary()]
    frames[place] = odd
    assert decode_batches(frames, 1) is None
    assert decode_batches([odd] * len(frames), 1) is None  # nor as the layout that all of them share


def test_a_stream_that_is_its_own_marker_is_no_marker_in_another_frame() -> None:
    frames = [encode_batch(batch) for batch in ordinary()]
    for marker in (0x80, 0x98, 0xC0, 0xC3, 0xCC, 0xE0, 0xFF):
        frames[9] = frames[9][:2] + bytes([marker]) + frames[9][3:]
        assert decode_batches(frames, 1) is None


def test_bytes_that_are_not_whole_indices() -> None:
    frames = [encode_batch(batch._replace(executed=b"abc", proposed=None)) for batch in ordinary()]
    same(frames, 1)
    assert decode_batches(frames, 2) is None


def test_few_frames_are_not_worth_a_table() -> None:
    assert decode_batches([encode_batch(batch) for batch in ordinary(MIN_FRAMES - 1)], 1) is None
    many_lengths = [encode_batch(Batch(5, n, 0, 0, bytes(n))) for n in range(1, 100)]
    assert decode_batches(many_lengths, 1) is None


@settings(deadline=None, max_examples=300)
@given(
    template=st.builds(
        Batch,
        stream=numbers,
        sequence=numbers.filter(bool),
        phase=st.integers(0, 1),
        step=numbers,
        executed=st.binary(min_size=4, max_size=4),
        proposed=st.none() | st.binary(min_size=4, max_size=4),
        row_entropy=st.none() | st.floats(allow_nan=False),
    ),
    damage=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 200), st.integers(0, 255)), max_size=3),
)
def test_damaged_frames_are_never_read_as_something_else(template: Batch, damage: list[tuple[int, int, int]]) -> None:
    frames = [bytearray(encode_batch(template)) for _ in range(40)]
    for which, at, value in damage:
        frames[which][at % len(frames[which])] = value
    given_frames = [bytes(frame) for frame in frames]
    table = decode_batches(given_frames, 1)
    try:
        expected = [batch._replace(step=0) for batch in one_by_one(given_frames)]
    except (FrameError, AssertionError):
        assert table is None
        return
    if table is not None:
        assert repr(rows(table)) == repr(expected)  # as text, so that −0.0 is not 0.0
    elif not damage:
        raise AssertionError(f"an ordinary drain was refused: {template}")
