"""Frames: inverses, and every way in which bytes are not one."""

from __future__ import annotations

import math
import re

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotuned.wire import Batch, DeviceBatch, action_dtype, decode_batch, decode_control, encode_batch, encode_control
from cotuned.wire.codec import MAX_CONTROL_BYTES
from cotuned.wire.errors import FrameError
from cotuned.wire.protocol import MAX_SEQUENCE, PROTOCOL_VERSION

numbers = st.integers(0, MAX_SEQUENCE)
batches = st.binary(max_size=200).flatmap(
    lambda executed: st.builds(
        Batch,
        stream=numbers,
        sequence=st.integers(1, MAX_SEQUENCE),
        phase=st.integers(0, 1),
        step=numbers,
        executed=st.just(executed),
        proposed=st.none() | st.binary(min_size=len(executed), max_size=len(executed)),
        row_entropy=st.none() | st.floats(allow_nan=False),
    )
)


@given(batches)
def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(
    st.builds(
        DeviceBatch,
        numbers,
        st.integers(1, MAX_SEQUENCE),
        st.integers(0, 1),
        numbers,
        offset=st.integers(0, MAX_SEQUENCE // 8).map(lambda n: 8 * n),
        n=st.integers(1, MAX_SEQUENCE),
        item_bytes=st.sampled_from([1, 2, 4, 8]),
    )
)
def test_a_batch_in_gpu_memory_comes_back_as_it_was(batch: DeviceBatch) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(st.binary(max_size=300))
def test_random_bytes_are_a_batch_or_a_frame_error(frame: bytes) -> None:
    try:
        batch = decode_batch(frame)
    except FrameError:
        return
    assert decode_batch(encode_batch(batch)) == batch or math.isnan(batch.row_entropy or 0.0)


@given(batches, st.data())
def test_a_cut_frame_is_refused(batch: Batch, data: st.DataObject) -> None:
    frame = encode_batch(batch)
    with pytest.raises(FrameError):
        decode_batch(frame[: data.draw(st.integers(0, len(frame) - 1))])


GOOD = [PROTOCOL_VERSION, 7, 1, 0, 0, b"\1\2", None, None]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, 2, "protocol version 2"),
        (0, "1", "not a batch frame"),
        (1, -1, "'stream': got -1"),
        (1, 2**63, "'stream'"),
        (1, True, "'stream': got True"),
        (2, 0, "'sequence': got 0"),
        (2, 1.0, "'sequence': got 1.0"),
        (3, 2, "'phase': got 2"),
        (3, False, "'phase': got False"),
        (4, None, "'step': got None"),
        (5, 7, "'executed': got int"),
        (5, [1, 2], "'executed': got [1, 2]"),
        (5, [0, 1, 1, 1], "'executed': got [0, 1, 1, 1]"),
        (5, [0, 1, True], "'executed': got [0, 1, True]"),
        (5, [-1, 1, 1], "'executed': got [-1, 1, 1]"),
        (5, [0, 2**64 - 1, 1], "'executed': got [0, 18446744073709551615, 1]"),
        (5, [0, 0, 1], "'executed': got [0, 0, 1]"),
        (5, [0, 1, 3], "'executed': got [0, 1, 3]"),
        (5, [2, 1, 4], "'executed': got [2, 1, 4]"),
        (5, [[], [], []], "'executed': got [[], [], []]"),
        (6, b"\1", "'proposed': got 1 bytes for 2"),
        (6, 3, "'proposed': got int"),
        (7, 1, "'row_entropy': got 1"),
        (7, {}, "'row_entropy'"),
        (7, msgpack.ExtType(1, b"x"), "not a batch frame"),
    ],
)
def test_a_wrong_field_is_named(place: int, value: object, says: str) -> None:
    fields = list(GOOD)
    fields[place] = value
    with pytest.raises(FrameError, match=re.escape(says)):
        decode_batch(msgpack.packb(fields))


@pytest.mark.parametrize(("proposed", "row_entropy"), [(b"\1", None), (None, 0.5)])
def test_a_batch_in_gpu_memory_has_no_reports(proposed: bytes | None, row_entropy: float | None) -> None:
    with pytest.raises(FrameError, match="beside 'proposed' or 'row_entropy'"):
        decode_batch(msgpack.packb([*GOOD[:5], [0, 1, 1], proposed, row_entropy]))


@pytest.mark.parametrize("message", [[], GOOD[:-1], [*GOOD, 1], {}, 5, "text", None])
def test_another_shape_is_refused(message: object) -> None:
    with pytest.raises(FrameError):
        decode_batch(msgpack.packb(message))


def test_deep_nesting_is_refused_cheaply() -> None:
    with pytest.raises(FrameError):
        decode_batch(b"\x91" * 1_000_000)
    with pytest.raises(FrameError):
        decode_control(b"\x91" * 60_000)


def test_a_control_map_comes_back() -> None:
    message = {"id": 3, "op": "cotune", "value": 1.5, "name": "α"}
    assert decode_control(encode_control(message)) == {"v": PROTOCOL_VERSION, **message}


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "not a control frame"),
        (b"\xc1", "not a control frame"),
        (msgpack.packb([1]), "expected a control frame"),
        (msgpack.packb({"v": 1, 2: 3}), "not allowed for map key"),
        (b"\x82\xa1v\x01\xa1v\x01", "twice"),
        (msgpack.packb({"v": 9}), "protocol version 9"),
        (msgpack.packb({"v": True}), "protocol version True"),
        (msgpack.packb({"id": 1}), "protocol version None"),
        (msgpack.packb({"v": 1, "x": msgpack.ExtType(4, b"x")}), "not a control frame"),
        (msgpack.packb({"v": 1, "x": msgpack.ExtType(4, b"")}), "extension type 4"),
        (b"\x00" * (MAX_CONTROL_BYTES + 1), "at most"),
    ],
)
def test_a_bad_control_frame_says_what_it_is(frame: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        decode_control(frame)


def test_another_version_has_its_own_code() -> None:
    with pytest.raises(FrameError) as caught:
        decode_control(msgpack.packb({"v": 9}))
    assert caught.value.code == "protocol_mismatch"


@pytest.mark.parametrize(("n_actions", "dtype"), [(2, "u1"), (256, "u1"), (257, "<u2"), (4096, "<u2")])
def test_the_narrowest_dtype_holds_every_index(n_actions: int, dtype: str) -> None:
    assert action_dtype(n_actions) == np.dtype(dtype)
    assert np.iinfo(action_dtype(n_actions)).max >= n_actions - 1
