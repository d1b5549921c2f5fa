"""The contract between client and daemon: frames, messages, answers, errors and the slot table. A leaf: imports no
other package of cotuned."""

from .answers import (
    AcknowledgeAnswer,
    AttachAnswer,
    CotuneAnswer,
    EntropyAnswer,
    HelloAnswer,
    ReadAnswer,
    StatsAnswer,
    StatusAnswer,
    answer_from_map,
)
from .codec import (
    PHASES,
    Batch,
    DeviceBatch,
    action_dtype,
    decode_batch,
    decode_control,
    encode_batch,
    encode_control,
)
from .protocol import MAX_ACTIONS, MIN_ACTIONS, PROTOCOL_VERSION
from .slots import SOURCE_SLOTS, Counter, PoolColumn, Slot, TunerStatus

__all__ = [
    "MAX_ACTIONS",
    "MIN_ACTIONS",
    "PHASES",
    "PROTOCOL_VERSION",
    "SOURCE_SLOTS",
    "AcknowledgeAnswer",
    "AttachAnswer",
    "Batch",
    "CotuneAnswer",
    "Counter",
    "DeviceBatch",
    "EntropyAnswer",
    "HelloAnswer",
    "PoolColumn",
    "ReadAnswer",
    "Slot",
    "StatsAnswer",
    "StatusAnswer",
    "TunerStatus",
    "action_dtype",
    "answer_from_map",
    "decode_batch",
    "decode_control",
    "encode_batch",
    "encode_control",
]
