"""Control messages: what a client may ask, as frozen dataclasses that check their own values.

The client makes them; the daemon makes them from a map whose types and keys pydantic has checked, and gets the same
value checks, since they stand here in ``__post_init__``. On the wire a message is a map of its fields and its `op`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .protocol import DEFAULT_RUN, MAX_ACTIONS, MAX_SEQUENCE, MIN_ACTIONS, check_name

MAX_WAIT_MS = 60_000
IPC_HANDLE_BYTES = 64
_MAX_IDENTITY = 64


def _check_range(field: str, value: int, lowest: int, highest: int = MAX_SEQUENCE) -> None:
    if not lowest <= value <= highest:
        allowed = f"{lowest} to {'2^63 - 1' if highest == MAX_SEQUENCE else highest}"
        raise ValueError(f"{field}: got {value!r:.40}, allowed is {allowed}")


def _check_normal(field: str, value: float) -> None:
    """A bus on a GPU makes 0 of what is subnormal in float32, one on the host does not: neither takes it."""
    if 0 < abs(value) < SMALLEST_NORMAL:
        raise ValueError(f"{field}: got {value}, subnormal in float32, expected 0 or at least {SMALLEST_NORMAL:.4g}")


def _check_slot(slot: int | str) -> None:
    if isinstance(slot, str):
        check_name("slot", slot)
    else:
        _check_range("slot", slot, 0)


@dataclass(frozen=True, slots=True)
class Hello:
    """An actor opens its stream, or takes it up again. Creates the run if there is none of this name."""

    actor: str
    stream: int
    """Random number of this actor client's life."""
    base: int
    """Last batch number that the daemon has confirmed to this client as durable; 0 at first."""
    run: str = DEFAULT_RUN
    n_actions: int | None = None
    """K that the actor was built for; the daemon refuses another one. None: take the daemon's."""
    op: ClassVar[str] = "hello"

    def __post_init__(self) -> None:
        check_name("actor", self.actor)
        check_name("run", self.run)
        _check_range("stream", self.stream, 0)
        _check_range("base", self.base, 0)
        if self.n_actions is not None:
            _check_range("n_actions", self.n_actions, MIN_ACTIONS, MAX_ACTIONS)


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """How far a stream has come. The answer is held back until `wait_for` is durable, at most `wait_ms`."""

    stream: int
    wait_for: int = 0
    wait_ms: int = 0
    """Milliseconds."""
    rejections_seen: int = 0
    """Highest batch number whose rejection this client has handled; the daemon forgets those."""
    op: ClassVar[str] = "acknowledge"

    def __post_init__(self) -> None:
        _check_range("stream", self.stream, 0)
        _check_range("wait_for", self.wait_for, 0)
        _check_range("wait_ms", self.wait_ms, 0, MAX_WAIT_MS)
        _check_range("rejections_seen", self.rejections_seen, 0)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """An actor ends its stream after a flush; the daemon may forget it."""

    stream: int
    op: ClassVar[str] = "goodbye"

    def __post_init__(self) -> None:
        _check_range("stream", self.stream, 0)


@dataclass(frozen=True, slots=True)
class Cotune:
    """One learner step asks for α and τ. Creates the run if there is none of this name."""

    session: int
    """Random number of this learner's life; ranks of one job pass the same one."""
    step: int
    run: str = DEFAULT_RUN
    policy_entropy: float | None = None
    """Mean policy entropy of this step; nats. None: not reported."""
    op: ClassVar[str] = "cotune"

    def __post_init__(self) -> None:
        check_name("run", self.run)
        _check_range("session", self.session, 0)
        _check_range("step", self.step, 0)
        value = self.policy_entropy
        if value is not None:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"policy_entropy: got {value}, expected nats, a finite number from 0 to ln K")
            _check_normal("policy_entropy", value)


@dataclass(frozen=True, slots=True)
class Entropy:
    """The entropies of a run as they stand."""

    run: str = DEFAULT_RUN
    op: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        check_name("run", self.run)


@dataclass(frozen=True, slots=True)
class Read:
    """One slot's value, by number or by registered name."""

    slot: int | str
    run: str = DEFAULT_RUN
    op: ClassVar[str] = "read"

    def __post_init__(self) -> None:
        check_name("run", self.run)
        _check_slot(self.slot)


@dataclass(frozen=True, slots=True)
class Write:
    """Writes one of the user's slots. Creates the run if there is none of this name."""

    slot: int | str
    value: float
    run: str = DEFAULT_RUN
    op: ClassVar[str] = "write"

    def __post_init__(self) -> None:
        check_name("run", self.run)
        _check_slot(self.slot)
        if not (math.isfinite(self.value) and abs(self.value) <= MAX_FLOAT32):
            raise ValueError(f"value: got {self.value}, expected a finite number that float32 can hold")
        _check_normal("value", self.value)


MAX_FLOAT32 = 3.4028234663852886e38
SMALLEST_NORMAL = 2.0**-126
"""Smallest number above 0 that float32 holds in full precision."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Where a run's row lies in GPU memory. Creates the run if there is none of this name."""

    run: str = DEFAULT_RUN
    op: ClassVar[str] = "attach"

    def __post_init__(self) -> None:
        check_name("run", self.run)


@dataclass(frozen=True, slots=True)
class Share:
    """An actor offers memory of its own on the daemon's GPU, out of which its batches may be taken.

    It replaces what the stream offered before.
    """

    stream: int
    handle: bytes
    """cudaIpcMemHandle_t of the allocation; 64 bytes."""
    size: int
    """Bytes of the allocation."""
    gpu: str
    """UUID of the GPU; 32 hexadecimal digits."""
    host: str
    """Machine of the actor (`wire.host`)."""
    op: ClassVar[str] = "share"

    def __post_init__(self) -> None:
        _check_range("stream", self.stream, 0)
        _check_range("size", self.size, 1)
        if len(self.handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"handle: got {len(self.handle)} bytes, expected {IPC_HANDLE_BYTES}")
        for name in ("gpu", "host"):
            if len(getattr(self, name)) > _MAX_IDENTITY:
                raise ValueError(f"{name}: got {len(getattr(self, name))} characters, at most {_MAX_IDENTITY} fit")


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of a run."""

    run: str = DEFAULT_RUN
    op: ClassVar[str] = "stats"

    def __post_init__(self) -> None:
        check_name("run", self.run)


@dataclass(frozen=True, slots=True)
class Status:
    """The daemon as a whole."""

    op: ClassVar[str] = "status"


Request = Hello | Acknowledge | Goodbye | Cotune | Entropy | Read | Write | Attach | Share | Stats | Status
