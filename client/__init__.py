"""What actors and learners use. Needs numpy, pyzmq and msgpack only."""

from ..wire.answers import CotuneAnswer, EntropyAnswer, StatsAnswer, StatusAnswer
from ..wire.errors import (
    ActionCountMismatch,
    BatchRejected,
    ClientClosed,
    ClientInUse,
    CotunedError,
    DaemonUnreachable,
    FlushTimeout,
    FrameError,
    InvalidActions,
    InvalidRequest,
    LimitReached,
    ProtocolMismatch,
    RequestRefused,
    SlotReadOnly,
    Stopping,
    StreamLost,
    UnknownRun,
    UnknownSlot,
    WindowFull,
)
from ..wire.slots import Slot
from .actor import ActorClient
from .gates import ChainOutcome, ConfidenceGate, Gate, GateChain, GateOutcome, MaskGate
from .learner import LearnerClient

__all__ = [
    "ActionCountMismatch",
    "ActorClient",
    "BatchRejected",
    "ChainOutcome",
    "ClientClosed",
    "ClientInUse",
    "ConfidenceGate",
    "CotuneAnswer",
    "CotunedError",
    "DaemonUnreachable",
    "EntropyAnswer",
    "FlushTimeout",
    "FrameError",
    "Gate",
    "GateChain",
    "GateOutcome",
    "InvalidActions",
    "InvalidRequest",
    "LearnerClient",
    "LimitReached",
    "MaskGate",
    "ProtocolMismatch",
    "RequestRefused",
    "Slot",
    "SlotReadOnly",
    "StatsAnswer",
    "StatusAnswer",
    "Stopping",
    "StreamLost",
    "UnknownRun",
    "UnknownSlot",
    "WindowFull",
]
