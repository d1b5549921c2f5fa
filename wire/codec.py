"""Frames: how a batch and a control message look on the wire. `encode_…` and `decode_…` are inverses.

A **batch** travels from an actor's PUSH to the daemon's PULL socket as one frame, a msgpack array::

    ┌─────────┬────────┬──────────┬───────┬──────┬──────────┬─────────────────┬───────────────────┐
    │ version │ stream │ sequence │ phase │ step │ executed │ proposed or nil │ row_entropy or nil│
    │ int     │ int    │ int      │ 0 / 1 │ int  │ bin      │ bin             │ float             │
    └─────────┴────────┴──────────┴───────┴──────┴──────────┴─────────────────┴───────────────────┘

``executed`` and ``proposed`` are raw action indices, uint8 when K ≤ 256, else little-endian uint16. Where the actor
shares GPU memory with the daemon, ``executed`` may be a place in it instead: an array ``[offset, n, item_bytes]``, with
``proposed`` and ``row_entropy`` nil.
``row_entropy`` is the sum of the entropies (nats) of the batch's n post-gate rows.

A **control message** travels between DEALER and ROUTER as one frame, a msgpack map. A request carries ``v`` (protocol
version), ``id`` (echoed in the answer, so a late answer is never taken for another one's), ``op`` and its fields.
An answer carries ``v``, ``id``, ``generation`` (a random number of the daemon's life) and either ``answer`` or
``error: {code, message}``.

Every limit is explicit, extension types are refused, nothing is unpickled, and each frame gets a decoder of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgpack as _untyped_msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from .errors import FrameError
from .protocol import MAX_SEQUENCE, PROTOCOL_VERSION
from .shown import shown, why

msgpack: Any = _untyped_msgpack

PHASES = ("train", "prefill")
"""Phase names; a phase's number on the wire is its place here."""

MAX_CONTROL_BYTES = 64 * 1024
BATCH_FIELDS = 8
_MAX_MAP = 64
_MAX_ARRAY = 4096
_MAX_STRING = 16 * 1024


class Batch(NamedTuple):
    """One pushed batch as it is on the wire. A named tuple, since the daemon makes one for each frame."""

    stream: int
    """Random number of one actor client's life (its incarnation), 0 to 2^63 − 1."""
    sequence: int
    """Number of the batch in its stream, from 1."""
    phase: int
    """0 train, 1 prefill."""
    step: int
    """The actor's step, 0 to 2^63 − 1; kept for the record, not used for tuning."""
    executed: bytes
    """Post-gate action indices, raw."""
    proposed: bytes | None = None
    """Pre-gate action indices, raw, as many as `executed`; None when not reported."""
    row_entropy: float | None = None
    """Sum over the batch of the entropy of each post-gate row; nats. None when not reported."""


class DeviceBatch(NamedTuple):
    """A batch whose actions lie in the GPU memory that the actor shares; the first four fields are as in `Batch`."""

    stream: int
    sequence: int
    phase: int
    step: int
    offset: int
    """Where the post-gate action indices begin; bytes, a multiple of `item_bytes`."""
    n: int
    """How many, at least 1."""
    item_bytes: int
    """Bytes of one index: 1, 2, 4 or 8. They are read as unsigned: −1 is far out of range, but as int8 it is 255."""


def action_dtype(n_actions: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The dtype of action indices on the wire for K = `n_actions`."""
    return np.dtype("u1") if n_actions <= 256 else np.dtype("<u2")


def encode_batch(batch: Batch | DeviceBatch) -> bytes:
    """The frame of a batch."""
    fields: tuple[Any, ...] = batch
    if isinstance(batch, DeviceBatch):
        fields = (*batch[:4], batch[4:], None, None)
    return cast(bytes, msgpack.packb((PROTOCOL_VERSION, *fields)))


def decode_batch(frame: bytes | memoryview, index_bytes: int = 1) -> Batch | DeviceBatch:
    """The batch of a frame.

    Args:
        frame: as it came over the wire.
        index_bytes: bytes of one action index; `executed` must hold whole ones.

    Raises:
        FrameError: not a msgpack array of 8 fields of the types above, or another protocol version.
    """
    try:
        fields = cast(
            "list[Any]",
            msgpack.unpackb(
                frame,
                use_list=True,
                max_array_len=BATCH_FIELDS,
                max_map_len=0,
                max_ext_len=0,
                max_str_len=0,
                max_bin_len=len(frame),
            ),
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(f"got {len(frame)} bytes that are not a batch frame: {why(error)}") from error
    if type(fields) is not list or not fields:
        raise FrameError(f"got a {type(fields).__name__}, expected a batch frame: an array of {BATCH_FIELDS} fields")
    if fields[0] != PROTOCOL_VERSION:
        raise FrameError(
            f"got a batch of protocol version {shown(fields[0])}, this side speaks {PROTOCOL_VERSION}: "
            "install the same cotuned release on both sides",
            "protocol_mismatch",
        )
    if len(fields) != BATCH_FIELDS:
        raise FrameError(f"got a batch frame of {len(fields)} fields, expected {BATCH_FIELDS}")
    if type(fields[5]) is list:
        return _device_batch(fields)
    batch = Batch._make(fields[1:])
    _check_batch(batch, index_bytes)
    return batch


def _check_numbers(batch: Batch | DeviceBatch) -> None:
    for name in ("stream", "sequence", "step"):
        value = getattr(batch, name)
        if type(value) is not int or not 0 <= value <= MAX_SEQUENCE:
            raise FrameError(f"batch field {name!r}: got {shown(value)}, expected an integer from 0 to 2^63 - 1")
    if batch.sequence == 0:
        raise FrameError("batch field 'sequence': got 0, expected a number from 1")
    if type(batch.phase) is not int or not 0 <= batch.phase < len(PHASES):
        raise FrameError(f"batch field 'phase': got {shown(batch.phase)}, expected 0 (train) or 1 (prefill)")


def _device_batch(fields: list[Any]) -> DeviceBatch:
    place = fields[5]
    if len(place) != 3 or not all(type(value) is int and 0 <= value <= MAX_SEQUENCE for value in place):
        raise FrameError(
            f"batch field 'executed': got {shown(place)}, expected [offset, n, item_bytes], integers from 0"
        )
    batch = DeviceBatch(*fields[1:5], *place)
    _check_numbers(batch)
    if batch.n == 0 or batch.item_bytes not in (1, 2, 4, 8) or batch.offset % batch.item_bytes:
        raise FrameError(
            f"batch field 'executed': got {shown(place)}, expected n from 1, item_bytes 1, 2, 4 or 8, and an offset "
            "that is a multiple of item_bytes"
        )
    if fields[6] is not None or fields[7] is not None:
        raise FrameError(
            "batch field 'executed': got a place in GPU memory beside 'proposed' or 'row_entropy'; send nil"
        )
    return batch


def _check_batch(batch: Batch, index_bytes: int) -> None:
    _check_numbers(batch)
    if type(batch.executed) is not bytes:
        raise FrameError(f"batch field 'executed': got {type(batch.executed).__name__}, expected bin or an array of 3")
    if len(batch.executed) % index_bytes:
        raise FrameError(
            f"batch field 'executed': got {len(batch.executed)} bytes, expected whole indices of {index_bytes} bytes"
        )
    if batch.proposed is not None:
        if type(batch.proposed) is not bytes:
            raise FrameError(f"batch field 'proposed': got {type(batch.proposed).__name__}, expected bin or nil")
        if len(batch.proposed) != len(batch.executed):
            raise FrameError(
                f"batch field 'proposed': got {len(batch.proposed)} bytes for {len(batch.executed)} of 'executed'; "
                "one proposed action is expected for each executed one"
            )
    if batch.row_entropy is not None and type(batch.row_entropy) is not float:
        raise FrameError(f"batch field 'row_entropy': got {shown(batch.row_entropy)}, expected a float or nil")


def encode_control(message: dict[str, Any]) -> bytes:
    """The frame of a control message; adds the protocol version."""
    return cast(bytes, msgpack.packb({"v": PROTOCOL_VERSION, **message}))


def decode_control(frame: bytes) -> dict[str, Any]:
    """The map of a control frame. Its fields are *not* validated here.

    Raises:
        FrameError: not a msgpack map with string keys, a key twice, too large, or another protocol version.
    """
    if len(frame) > MAX_CONTROL_BYTES:
        raise FrameError(f"got a control frame of {len(frame)} bytes, at most {MAX_CONTROL_BYTES} are allowed")
    try:
        message: Any = msgpack.unpackb(
            frame,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_extensions,  # max_ext_len=0 lets those of length 0 pass
            max_array_len=_MAX_ARRAY,
            max_map_len=_MAX_MAP,
            max_ext_len=0,
            max_str_len=_MAX_STRING,
            max_bin_len=_MAX_STRING,
        )
    except FrameError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(f"got {len(frame)} bytes that are not a control frame: {why(error)}") from error
    if type(message) is not dict:
        raise FrameError(f"got a {type(message).__name__}, expected a control frame: a map")
    version = cast("dict[str, Any]", message).get("v")
    if version != PROTOCOL_VERSION or type(version) is not int:
        raise FrameError(
            f"got a message of protocol version {shown(version, 40)}, this side speaks {PROTOCOL_VERSION}: "
            "install the same cotuned release on both sides",
            "protocol_mismatch",
        )
    return cast("dict[str, Any]", message)


def _no_extensions(code: int, data: bytes) -> Any:
    raise FrameError(f"got the msgpack extension type {code}, expected none")


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if type(key) is not str:
            raise FrameError(f"got the map key {shown(key)}, expected text")
        if key in result:
            raise FrameError(f"got the map key {shown(key)} twice")
        result[key] = value
    return result
