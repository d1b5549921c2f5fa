"""The one table of the ISV bus: slots (float32), counters (int64), and what the daemon owns.

The CUDA sources get these numbers as ``#define``s (`slot_defines`), so Python and CUDA cannot drift apart.
"""

from __future__ import annotations

from enum import IntEnum

DEFAULT_MAX_RUNS = 16
DEFAULT_N_SLOTS = 1024
FIRST_OWNED_SLOT = 583
LAST_OWNED_SLOT = 639
MIN_N_SLOTS = LAST_OWNED_SLOT + 1


class Slot(IntEnum):
    """Slots with a fixed meaning; float32, one value a run. Each member's ``__doc__`` gives its meaning and unit."""

    def __new__(cls, number: int, doc: str) -> Slot:
        member = int.__new__(cls, number)
        member._value_ = number
        member.__doc__ = doc
        return member

    RL_POLICY_ENTROPY_EMA_INDEX = 420, "EMA of the policy entropy that the learner reports; nats."
    RL_ACTION_ENTROPY_EMA_INDEX = (
        583,
        "EMA of the entropy of the executed (post-gate) actions; nats. 0.0 also means unset.",
    )
    ACTION_ENTROPY = 584, "The last observation behind slot 583, before the EMA; nats."
    ALPHA = 585, "SAC entropy coefficient α; always exp(LOG_ALPHA)."
    LOG_ALPHA = 586, "ln α, the number that the rule moves."
    TAU = 587, "Softmax temperature τ of the Q→π distillation target; always exp(LOG_TAU)."
    LOG_TAU = 588, "ln τ, the number that the rule moves."
    EFFECTIVE_TARGET = 589, "T_eff, what the last update steered to; nats."
    ENTROPY_ERROR = 590, "e = T_eff − H[source] at the last update; nats."
    GATE_RATE_EMA = 591, "EMA of the share of executed actions that differ from the proposed ones; 0 to 1."
    GATE_RATE = 592, "The last observation behind GATE_RATE_EMA."
    CONDITIONAL_ENTROPY_EMA = 593, "EMA of E_s[H], mean entropy of the reported post-gate rows; nats."
    CONDITIONAL_ENTROPY = 594, "The last observation behind CONDITIONAL_ENTROPY_EMA; nats."
    ALPHA_FIRST_MOMENT = 595, "Adam's first moment of the gradient of log α."
    ALPHA_SECOND_MOMENT = 596, "Adam's second moment of the gradient of log α."
    TUNER_STATUS = 597, "What the last `cotune` did: a `TunerStatus` as a number."


class TunerStatus(IntEnum):
    """Value of ``Slot.TUNER_STATUS``."""

    WAITING = 0
    """The source has no observation yet: α and τ stand at their initial values."""
    UPDATED = 1
    """The last new step moved α and τ."""
    HELD = 2
    """The last new step found no new observation, so nothing moved."""
    AT_BOUND = 3
    """The last new step pushed α or τ against a bound; it stands on it."""


class Counter(IntEnum):
    """Counters of a run: int64 beside the bus, since float32 counts exactly only to 2^24."""

    OBSERVATIONS = 0
    """Observations made of executed actions (pools that were full)."""
    POLICY_OBSERVATIONS = 1
    """Policy entropies that the learner reported."""
    CONDITIONAL_OBSERVATIONS = 2
    """Observations in which at least one post-gate row was reported."""
    GATE_OBSERVATIONS = 3
    """Observations in which at least one proposed action was reported."""
    SOURCE_SEEN = 4
    """Observations of the tuner's source that the last update had seen; fewer than there are now means fresh."""
    UPDATES = 5
    """Updates of α and τ."""
    BATCHES_TRAIN = 6
    """Accepted batches of the train phase."""
    BATCHES_PREFILL = 7
    """Accepted batches of the prefill phase."""
    ACTIONS_TRAIN = 8
    """Accepted actions of the train phase."""
    ACTIONS_PREFILL = 9
    """Accepted actions of the prefill phase."""
    BATCHES_REJECTED = 10
    """Batches with an index outside [0, K), or with a reported entropy that cannot be; they changed nothing else."""


class PoolColumn(IntEnum):
    """Columns of a run's pool after its K action counts: int64, so that pooling is exact in any order."""

    ACTIONS = 0
    """Actions in the pool: the sum of the K counts."""
    PROPOSED = 1
    """Actions whose proposed action was reported too."""
    GATED = 2
    """Of those, the ones where executed ≠ proposed."""
    ROWS = 3
    """Post-gate rows reported."""
    ROW_ENTROPY = 4
    """Sum of those rows' entropies in units of 2^-24 nat (`ROW_ENTROPY_UNIT`)."""


ROW_ENTROPY_UNIT = 2.0**-24
"""Nats in one unit of ``PoolColumn.ROW_ENTROPY``. Integers add up to the same bits in any order; floats do not."""

SOURCE_SLOTS: dict[str, tuple[Slot, Counter]] = {
    "executed": (Slot.RL_ACTION_ENTROPY_EMA_INDEX, Counter.OBSERVATIONS),
    "policy": (Slot.RL_POLICY_ENTROPY_EMA_INDEX, Counter.POLICY_OBSERVATIONS),
    "conditional": (Slot.CONDITIONAL_ENTROPY_EMA, Counter.CONDITIONAL_OBSERVATIONS),
}
"""What the tuner can be steered by: the slot it reads and the counter that says whether there is something new."""


def is_owned(slot: int) -> bool:
    """Whether only the daemon writes this slot."""
    return slot == int(Slot.RL_POLICY_ENTROPY_EMA_INDEX) or FIRST_OWNED_SLOT <= slot <= LAST_OWNED_SLOT


def slot_defines() -> dict[str, int]:
    """Names and numbers for the CUDA sources: ``SLOT_…``, ``STATUS_…``, ``COUNTER_…`` and ``POOL_…``."""
    defines: dict[str, int] = {f"SLOT_{member.name}": member.value for member in Slot}
    defines |= {f"STATUS_{member.name}": member.value for member in TunerStatus}
    defines |= {f"COUNTER_{member.name}": member.value for member in Counter}
    defines |= {f"POOL_{member.name}": member.value for member in PoolColumn}
    return defines | {"N_COUNTERS": len(Counter), "N_POOL_COLUMNS": len(PoolColumn)}
