"""Answers to control messages: frozen dataclasses that the client hands to its user as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from .errors import FrameError

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """What an actor needs in order to push."""

    n_actions: int
    """K."""
    last: int
    """Last batch number taken from this stream."""
    known: bool
    """Whether the daemon knew the stream before; if not, it starts at the `base` that the actor gave."""
    actions_endpoint: str
    """Where the PULL socket listens."""
    max_frame_bytes: int
    """Largest batch frame that is taken; bytes."""


@dataclass(frozen=True, slots=True)
class AcknowledgeAnswer:
    """How far a stream has come."""

    known: bool
    """False: the daemon does not know the stream (it was restarted); say hello again."""
    applied: int
    """Last batch number that is in the counts (or was rejected)."""
    durable: int
    """Last batch number that survives the daemon's death. Where the daemon keeps no state this equals `applied`."""
    gap: bool
    """A later batch came than the next one, so batches in between are missing: resend from `applied` + 1."""
    rejections: list[tuple[int, str, str]]
    """Rejected batches not yet handled: number, code, sentence."""
    state_failing: bool
    """Whether the daemon's disk fails at present, so that nothing becomes durable."""


@dataclass(frozen=True, slots=True)
class CotuneAnswer:
    """α and τ for one learner step, and why."""

    run: str
    step: int
    """The learner step that this answer was made for."""
    alpha: float
    """SAC entropy coefficient α."""
    log_alpha: float
    """ln α."""
    tau: float
    """Softmax temperature of the Q→π distillation target."""
    log_tau: float
    """ln τ."""
    entropy: float
    """EMA of the executed-action entropy, slot 583; nats."""
    policy_entropy: float | None
    """EMA of the reported policy entropy, slot 420; nats. None: never reported."""
    conditional_entropy: float | None
    """EMA of E_s[H], the mean entropy of the reported post-gate rows; nats. None: never reported."""
    gate_rate: float | None
    """EMA of the share of actions that the gates changed, 0 to 1. None: proposed actions were never reported."""
    target_entropy: float
    """T_eff, what the source is steered to; nats."""
    error: float | None
    """T_eff − H[source] at the last update; nats. None: no update yet."""
    source: str
    """What the tuner is steered by: "executed" (583), "policy" (420) or "conditional" (593)."""
    observations: int
    """Observations of executed actions so far."""
    ready: bool
    """Whether the source was observed at all; until then α and τ stand at their initial values."""
    fresh: bool
    """Whether this step saw a new observation and moved α and τ."""
    at_bound: bool
    """Whether the last update pushed α or τ against a bound."""
    owner: bool
    """Whether the asking session owns tuning. False: a newer session does, and this one only reads."""
    reason: str
    """One sentence: what was done and why."""


@dataclass(frozen=True, slots=True)
class EntropyAnswer:
    """The entropies of a run."""

    run: str
    entropy: float
    """EMA of the executed-action entropy, slot 583; nats."""
    last_entropy: float
    """The last observation, before the EMA; nats."""
    policy_entropy: float | None
    """Slot 420; nats."""
    conditional_entropy: float | None
    """E_s[H] of the reported post-gate rows, EMA; nats."""
    gate_rate: float | None
    """Share of actions that the gates changed, EMA; 0 to 1."""
    max_entropy: float
    """ln K; nats."""
    observations: int
    pooled_actions: int
    """Actions that wait in the pool for the next observation."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """One slot."""

    slot: int
    value: float


@dataclass(frozen=True, slots=True)
class AttachAnswer:
    """Where a run's row lies in GPU memory."""

    device: str
    """The device in words, e.g. "cuda:0 (NVIDIA H200, CuPy 14.2.0)"."""
    gpu: str
    """Its UUID; 32 hexadecimal digits."""
    host: str
    """The daemon's machine (`wire.host`)."""
    handle: bytes
    """cudaIpcMemHandle_t of the bus."""
    offset: int
    """Where the row begins in it; bytes."""
    n_slots: int
    """float32 slots of the row."""


@dataclass(frozen=True, slots=True)
class ShareAnswer:
    """The daemon has mapped an actor's memory."""

    size: int
    """Bytes of it out of which batches may be taken."""


@dataclass(frozen=True, slots=True)
class StatsAnswer:
    """The counters of a run: exact, since its first batch."""

    run: str
    observations: int
    updates: int
    batches_train: int
    batches_prefill: int
    actions_train: int
    actions_prefill: int
    batches_rejected: int
    pooled_actions: int
    pooled_counts: list[int]
    """Counts a bin of the actions in the pool; K integers."""
    batches_duplicate: int
    """Batches that came again after they had been taken (resends); not counted twice."""
    batches_early: int
    """Batches that came before a missing one; the actor sends them again."""
    actors: int
    """Open streams."""

    @property
    def batches(self) -> int:
        """Accepted batches of both phases."""
        return self.batches_train + self.batches_prefill

    @property
    def actions(self) -> int:
        """Accepted actions of both phases."""
        return self.actions_train + self.actions_prefill


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """The daemon as a whole."""

    version: str
    protocol: int
    device: str
    """What the bus lives on, e.g. "cpu (NumPy 2.4)" or "cuda:0 (NVIDIA H200)"."""
    n_actions: int
    uptime: float
    """Seconds since the daemon was ready."""
    endpoints: dict[str, str]
    """Where each socket listens: actions, queries, watch."""
    state: str
    """What survives the daemon: "kept", "failing" (the disk does not take it at present) or "off"."""
    runs: list[str]
    actors: int
    batches: int
    """Accepted batches of all runs since the daemon started."""
    batches_rejected: int
    frames_malformed: int
    """Frames that were no batch at all, so nobody could be told."""
    frames_unknown: int
    """Batches of streams that the daemon does not know; their actors are told when they ask."""


def answer_from_map(cls: type[A], message: Mapping[str, Any]) -> A:
    """Makes an answer of class `cls`; keys that this version does not know are passed over.

    Raises:
        FrameError: a field is missing.
    """
    names = [field.name for field in fields(cast(Any, cls))]
    missing = [name for name in names if name not in message]
    if missing:
        raise FrameError(f"got an answer without {', '.join(missing)}; expected a {cls.__name__}")
    return cls(**{name: message[name] for name in names})
