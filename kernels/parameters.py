"""A run's tuning constants as one row of float64, so that the configuration's numbers reach the kernels exactly."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..config.settings import Settings
from ..wire.slots import SOURCE_SLOTS


class Parameter(IntEnum):
    """Columns of the parameter array ``[max_runs, len(Parameter)]``."""

    EMA_BLEND = 0
    """Weight of the new observation, 0.4 to 1."""
    SOURCE_SLOT = 1
    """Slot that the tuner is steered by."""
    SOURCE_COUNTER = 2
    """Counter of the observations behind it."""
    TARGET = 3
    """T in nats."""
    LR_ALPHA = 4
    BETA1 = 5
    BETA2 = 6
    EPSILON = 7
    LOG_ALPHA_INITIAL = 8
    LOG_ALPHA_MIN = 9
    LOG_ALPHA_MAX = 10
    LR_TAU = 11
    LOG_TAU_INITIAL = 12
    LOG_TAU_MIN = 13
    LOG_TAU_MAX = 14


def run_parameters(settings: Settings, run: str) -> npt.NDArray[np.float64]:
    """The parameter row of run `run`, shape ``[len(Parameter)]``."""
    tuner = settings.tuner_of(run)
    slot, counter = SOURCE_SLOTS[tuner.source]
    values: dict[Parameter, float] = {
        Parameter.EMA_BLEND: settings.observation.ema_blend,
        Parameter.SOURCE_SLOT: slot,
        Parameter.SOURCE_COUNTER: counter,
        Parameter.TARGET: tuner.target(settings.n_actions),
        Parameter.LR_ALPHA: tuner.lr_alpha,
        Parameter.BETA1: tuner.adam_beta1,
        Parameter.BETA2: tuner.adam_beta2,
        Parameter.EPSILON: tuner.adam_epsilon,
        Parameter.LOG_ALPHA_INITIAL: _log(tuner.alpha_initial),
        Parameter.LOG_ALPHA_MIN: _log(tuner.alpha_min),
        Parameter.LOG_ALPHA_MAX: _log(tuner.alpha_max),
        Parameter.LR_TAU: tuner.lr_tau,
        Parameter.LOG_TAU_INITIAL: _log(tuner.tau_initial),
        Parameter.LOG_TAU_MIN: _log(tuner.tau_min),
        Parameter.LOG_TAU_MAX: _log(tuner.tau_max),
    }
    return np.array([values[parameter] for parameter in Parameter], dtype=np.float64)


def _log(value: float) -> float:
    """ln as a slot holds it; on a bound that float32 cannot hold, standing would look like pushing."""
    return float(np.float32(math.log(value)))


def parameter_defines() -> dict[str, int]:
    """Names and numbers for the CUDA sources: ``PARAM_…``."""
    return {f"PARAM_{member.name}": member.value for member in Parameter} | {"N_PARAMETERS": len(Parameter)}
