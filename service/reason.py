"""The sentence in every co-tuning answer: what was done, from which numbers."""

from __future__ import annotations

import math

from ..config.settings import Settings, TunerSettings
from ..kernels import RowState
from ..wire.slots import SOURCE_SLOTS, Counter, PoolColumn, Slot, TunerStatus

_NAMES = {"executed": "executed entropy", "policy": "policy entropy", "conditional": "conditional executed entropy"}
_NOTABLE_GAP = 0.5
"""Nats between policy and executed entropy from which the sentence mentions it: far above estimation noise."""


def reason(state: RowState, tuner: TunerSettings, settings: Settings) -> str:
    """One sentence about the last new step of a run."""
    slot, _ = SOURCE_SLOTS[tuner.source]
    name, value = _NAMES[tuner.source], float(state.slots[slot])
    match TunerStatus(int(state.slots[Slot.TUNER_STATUS])):
        case TunerStatus.WAITING:
            return _waiting(state, tuner, settings)
        case TunerStatus.HELD:
            return f"held: {name} has no new observation since the last update (it stands at {value:.3f} nats)"
        case TunerStatus.UPDATED | TunerStatus.AT_BOUND:
            return _moved(state, tuner, name, value) + _at_bound(state, tuner) + _gap(state, tuner)


def _waiting(state: RowState, tuner: TunerSettings, settings: Settings) -> str:
    if tuner.source == "policy":
        return "waiting: no policy entropy was reported; pass policy_entropy to cotune, or steer by executed actions"
    pooled = int(state.pool[settings.n_actions + PoolColumn.ACTIONS])
    needed = settings.observation.pool_min_actions
    if tuner.source == "conditional" and state.counters[Counter.OBSERVATIONS]:
        return "waiting: no post-gate rows were reported; push(…, probs=…), or steer by executed actions"
    return f"waiting for the first observation: {pooled} of {needed} actions are pooled; α and τ stand as configured"


def _moved(state: RowState, tuner: TunerSettings, name: str, value: float) -> str:
    error, target = float(state.slots[Slot.ENTROPY_ERROR]), float(state.slots[Slot.EFFECTIVE_TARGET])
    side = "below" if error > 0 else "above"
    if error == 0:
        return f"{name} {value:.3f} nats is at the target {target:.3f}"
    verb = "raised" if error > 0 else "lowered"
    moved = [
        f"{sign} to {float(state.slots[at]):.4g}"
        for sign, at, gain in (("α", Slot.ALPHA, tuner.lr_alpha), ("τ", Slot.TAU, tuner.lr_tau))
        if gain > 0
    ]
    what = f": {verb} {' and '.join(moved)}" if moved else "; both learning rates are 0, so nothing moves"
    return f"{name} {value:.3f} nats is {abs(error):.3f} {side} the target {target:.3f}{what}"


def _at_bound(state: RowState, tuner: TunerSettings) -> str:
    standing = [
        f"{sign} stands at its {bound} bound {limit:g}"
        for sign, at, low, high in (
            ("α", Slot.LOG_ALPHA, tuner.alpha_min, tuner.alpha_max),
            ("τ", Slot.LOG_TAU, tuner.tau_min, tuner.tau_max),
        )
        for bound, limit in (("lower", low), ("upper", high))
        if math.isclose(float(state.slots[at]), math.log(limit), rel_tol=1e-6, abs_tol=1e-6)
    ]
    return f"; {' and '.join(standing)}, so the target may be out of reach" if standing else ""


def _gap(state: RowState, tuner: TunerSettings) -> str:
    if tuner.source != "policy" or not state.counters[Counter.OBSERVATIONS]:
        return ""
    executed = float(state.slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX])
    gap = float(state.slots[Slot.RL_POLICY_ENTROPY_EMA_INDEX]) - executed
    return f" — but the executed actions read {executed:.3f} nats" if abs(gap) > _NOTABLE_GAP else ""
