"""What a key may do. Its role is the folder in which it lies."""

from __future__ import annotations

from enum import Enum

from ..wire.messages import (
    Acknowledge,
    Attach,
    Cotune,
    Entropy,
    Goodbye,
    Hello,
    Read,
    Request,
    Share,
    Stats,
    Status,
    Write,
)


class Role(Enum):
    """A client's role; the value is its folder's name."""

    ACTOR = "actor"
    LEARNER = "learner"
    OBSERVER = "observer"


MAY_ASK: dict[Role, frozenset[type[Request]]] = {
    Role.ACTOR: frozenset({Hello, Acknowledge, Goodbye, Share, Status}),
    Role.LEARNER: frozenset({Cotune, Write, Attach, Read, Entropy, Stats, Status}),
    Role.OBSERVER: frozenset({Read, Entropy, Stats, Status}),
}
"""An actor's requests, `Status` apart, are about streams, and only about its own."""

MAY_CONNECT: dict[str, frozenset[Role]] = {
    "actions": frozenset({Role.ACTOR}),
    "queries": frozenset(Role),
    "watch": frozenset({Role.OBSERVER}),
}
"""By socket. PUB cannot tell its subscribers apart, so who may listen is decided when they connect."""
