"""What is thrown at the daemon: valid messages with something wrong, valid frames with wrong bytes, and noise.

Nothing here names the guarded run or its stream, so whatever happens to these is a fault.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from cotuned.wire.codec import Batch, DeviceBatch, encode_batch

RUNS = ("fuzz-a", "fuzz-b", "fuzz-c")
STREAMS = (11, 12, 13)
"""Opened beforehand, one in each run, so that some batches are taken."""

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 1e-45, 5e-324, -1e-40, 2.2e-308, 1e38, 3.5e38, 1.7e308, math.nan, math.inf, -math.inf),
    *("", "default\0", "a\nb", "ä" * 40, "x" * 65, "x" * 20_000, "../../etc/passwd", "__class__"),
    *(b"", b"\0" * 64, b"\xff" * 1000, [], [[]], [1, 2, 3], [[0] * 50] * 50, list(range(5000))),
    *({}, {"a": {}}, {"op": "cotune"}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(0)),
]
"""Values that no field, or hardly one, should have."""

REQUESTS: list[dict[str, Any]] = [
    {"op": "hello", "actor": "fuzz", "stream": 11, "base": 0, "run": RUNS[0], "n_actions": 11},
    {"op": "acknowledge", "stream": 12, "wait_for": 0, "wait_ms": 0, "rejections_seen": 0},
    {"op": "goodbye", "stream": 99},
    {"op": "cotune", "session": 5, "step": 1, "run": RUNS[1], "policy_entropy": 1.0},
    {"op": "entropy", "run": RUNS[1]},
    {"op": "read", "slot": 583, "run": RUNS[1]},
    {"op": "write", "slot": 7, "value": 1.5, "run": RUNS[2]},
    {"op": "attach", "run": RUNS[2]},
    {"op": "share", "stream": 13, "handle": bytes(64), "size": 4096, "gpu": "0" * 32, "host": "here"},
    {"op": "stats", "run": RUNS[0]},
    {"op": "status"},
]


class Input(NamedTuple):
    """One thing to send."""

    kind: str
    socket: str
    """ "actions" (PUSH) or "queries" (DEALER)."""
    frames: list[bytes]


class Inputs:
    """An endless supply, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: list[Callable[[], Input]] = [
            self._wrong_field,
            self._wrong_field,
            self._wrong_fields,
            self._mutated_request,
            self._noise_as_request,
            self._many_frames,
            self._odd_batch,
            self._odd_batch,
            self._mutated_batch,
            self._noise_as_batch,
            self._deep,
            self._valid_batch,
        ]

    def next(self) -> Input:
        """One more."""
        return self._random.choice(self._kinds)()

    # -- requests -----------------------------------------------------------------------------------------------

    def _request(self) -> dict[str, Any]:
        return {"v": 1, "id": self._random.randrange(2**40), **self._random.choice(REQUESTS)}

    def _wrong_field(self) -> Input:
        message = self._request()
        name = self._random.choice(list(message))
        match self._random.randrange(4):
            case 0:
                del message[name]
            case 1:
                message[self._random.choice(["extra", "run", "slot", "wait_ms", "ID", name + " "])] = self._odd()
            case _:
                message[name] = self._odd()
        return Input("request with a wrong field", "queries", [self._packed(message)])

    def _wrong_fields(self) -> Input:
        message = {
            name: self._odd() if self._random.random() < 0.5 else value for name, value in self._request().items()
        }
        if message.get("run") is not None and not isinstance(message["run"], str):
            message["run"] = RUNS[0]
        return Input("request with wrong fields", "queries", [self._packed(message)])

    def _odd(self) -> Any:
        return self._random.choice(ODD)

    def _packed(self, message: dict[Any, Any]) -> bytes:
        """Some with keys that are no text, or twice."""
        if self._random.random() < 0.05:
            message[self._random.choice([1, b"v", None, 2.5])] = 1
        packed: bytes = msgpack.packb({k: v for k, v in message.items() if not isinstance(v, int) or v < 2**64})
        if self._random.random() < 0.05 and packed[0] < 0x8F:
            packed = bytes([packed[0] + 1]) + packed[1:] + msgpack.packb("run") + msgpack.packb(RUNS[0])
        return packed

    def _mutated_request(self) -> Input:
        return Input("request with wrong bytes", "queries", [self._mutated(msgpack.packb(self._request()))])

    def _noise_as_request(self) -> Input:
        return Input("noise as a request", "queries", [self._random.randbytes(self._random.randrange(200))])

    def _many_frames(self) -> Input:
        frames = [self._random.randbytes(self._random.randrange(40)) for _ in range(self._random.randrange(2, 8))]
        if self._random.random() < 0.5:
            frames.append(msgpack.packb(self._request()))
        return Input("request of several frames", "queries", frames)

    def _deep(self) -> Input:
        depth = self._random.choice([2, 100, 1000, 60_000])
        opener = self._random.choice(
            [b"\x91", b"\x81\xa1a", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
        )
        frame = (opener * depth)[:60_000]
        return Input("deep nesting, large headers", self._random.choice(["actions", "queries"]), [frame])

    # -- batches ------------------------------------------------------------------------------------------------

    def _valid_batch(self) -> Input:
        """So that streams move on, and later ones are gaps, duplicates and rejections of a real stream."""
        actions = bytes(self._random.randrange(12) for _ in range(self._random.randrange(1, 20)))
        stream, number = self._random.choice(STREAMS), self._random.randrange(1, 2000)
        return Input("batch out of turn", "actions", [encode_batch(Batch(stream, number, 0, 0, actions))])

    def _odd_batch(self) -> Input:
        fields: list[Any] = [1, self._random.choice(STREAMS), self._random.randrange(1, 50), 0, 0, bytes(5), None, None]
        for _ in range(self._random.choice([1, 1, 1, 3])):
            fields[self._random.randrange(8)] = self._random.choice([*ODD, [0, 5, 1], [2**40, 2**40, 8], [0, 1, 3]])
        fields = fields[: self._random.choice([8, 8, 8, 7, 1])]
        fields = [2**64 - 1 if isinstance(value, int) and value >= 2**64 else value for value in fields]
        return Input("batch with a wrong field", "actions", [msgpack.packb(fields)])

    def _mutated_batch(self) -> Input:
        whole = [
            encode_batch(Batch(self._random.choice(STREAMS), 3, 0, 7, bytes(range(11)), bytes(11), 2.5)),
            encode_batch(DeviceBatch(self._random.choice(STREAMS), 3, 0, 7, 64, 100, 8)),
        ]
        return Input("batch with wrong bytes", "actions", [self._mutated(self._random.choice(whole))])

    def _noise_as_batch(self) -> Input:
        return Input("noise as a batch", "actions", [self._random.randbytes(self._random.randrange(300))])

    def _mutated(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self._random.choice([1, 1, 2, 8])):
            match self._random.randrange(4):
                case 0 if changed:
                    changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
                case 1:
                    del changed[self._random.randrange(len(changed) + 1) :]
                case 2:
                    changed.insert(self._random.randrange(len(changed) + 1), self._random.randrange(256))
                case _ if changed:
                    at = self._random.randrange(len(changed))
                    changed[at : at + self._random.randrange(8)] = b""
                case _:
                    pass
        return bytes(changed)
