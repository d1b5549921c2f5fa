"""One co-tuning update: the NumPy reference. The CUDA kernel stands in ``sac_cotune.cu``.

With e = T − H[source]:

* log α follows Adam (Kingma & Ba 2015) on the loss −log α · e, whose gradient is −e, as the automatic temperature of
  SAC (Haarnoja et al. 2018, §5) is implemented by Stable-Baselines3, Tianshou and TorchRL;
* log τ ← log τ + lr_τ · e.

Both are clipped. At a bound that it pushes against, Adam's first moment is set to 0: it does not wind up, and the first
errors of the other sign move α away. All arithmetic is float64; the bus keeps float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..wire.slots import Counter, Slot, TunerStatus
from .action_entropy import Float32Array, Int64Array, blend_first
from .parameters import Parameter


def initialize_tuner(slots: Float32Array, parameters: npt.NDArray[np.float64]) -> None:
    """Writes a new run's initial α, τ and target into its bus row."""
    slots[Slot.EFFECTIVE_TARGET] = parameters[Parameter.TARGET]
    for log_slot, slot, parameter in (
        (Slot.LOG_ALPHA, Slot.ALPHA, Parameter.LOG_ALPHA_INITIAL),
        (Slot.LOG_TAU, Slot.TAU, Parameter.LOG_TAU_INITIAL),
    ):
        _store(slots, log_slot, slot, float(parameters[parameter]))


def sac_cotune(
    slots: Float32Array, counters: Int64Array, parameters: npt.NDArray[np.float64], policy_entropy: float | None
) -> None:
    """One new learner step of one run; afterwards ``Slot.TUNER_STATUS`` says what it did.

    Args:
        slots: float32 [n_slots], the run's bus row; changed in place.
        counters: int64 [len(Counter)] of the run; changed in place.
        parameters: float64 [len(Parameter)] of the run.
        policy_entropy: what the learner reported for this step, nats; None: nothing.
    """
    p = parameters.tolist()
    if policy_entropy is not None:
        ema = Slot.RL_POLICY_ENTROPY_EMA_INDEX
        slots[ema] = blend_first(slots[ema], policy_entropy, p[Parameter.EMA_BLEND])
        counters[Counter.POLICY_OBSERVATIONS] += 1
    seen = int(counters[int(p[Parameter.SOURCE_COUNTER])])
    if seen == 0:
        slots[Slot.TUNER_STATUS] = TunerStatus.WAITING
        return
    if seen == counters[Counter.SOURCE_SEEN]:
        slots[Slot.TUNER_STATUS] = TunerStatus.HELD
        return
    counters[Counter.SOURCE_SEEN] = seen
    counters[Counter.UPDATES] += 1
    error = p[Parameter.TARGET] - float(slots[int(p[Parameter.SOURCE_SLOT])])
    slots[Slot.EFFECTIVE_TARGET] = p[Parameter.TARGET]
    slots[Slot.ENTROPY_ERROR] = error
    alpha_at_bound = _step_alpha(slots, int(counters[Counter.UPDATES]), p, error)
    tau_at_bound = _step_tau(slots, p, error)
    slots[Slot.TUNER_STATUS] = TunerStatus.AT_BOUND if alpha_at_bound or tau_at_bound else TunerStatus.UPDATED


def _step_alpha(slots: Float32Array, update: int, p: list[float], error: float) -> bool:
    beta1, beta2 = p[Parameter.BETA1], p[Parameter.BETA2]
    gradient = -error
    first = beta1 * float(slots[Slot.ALPHA_FIRST_MOMENT]) + (1 - beta1) * gradient
    second = beta2 * float(slots[Slot.ALPHA_SECOND_MOMENT]) + (1 - beta2) * gradient * gradient
    unbiased_first = first / (1 - beta1**update)
    unbiased_second = second / (1 - beta2**update)
    step = p[Parameter.LR_ALPHA] * unbiased_first / (math.sqrt(unbiased_second) + p[Parameter.EPSILON])
    wanted = float(slots[Slot.LOG_ALPHA]) - step
    low, high = p[Parameter.LOG_ALPHA_MIN], p[Parameter.LOG_ALPHA_MAX]
    at_bound = wanted < low or wanted > high
    slots[Slot.ALPHA_FIRST_MOMENT] = 0.0 if at_bound else first
    slots[Slot.ALPHA_SECOND_MOMENT] = second
    _store(slots, Slot.LOG_ALPHA, Slot.ALPHA, min(max(wanted, low), high))
    return at_bound


def _step_tau(slots: Float32Array, p: list[float], error: float) -> bool:
    wanted = float(slots[Slot.LOG_TAU]) + p[Parameter.LR_TAU] * error
    low, high = p[Parameter.LOG_TAU_MIN], p[Parameter.LOG_TAU_MAX]
    _store(slots, Slot.LOG_TAU, Slot.TAU, min(max(wanted, low), high))
    return wanted < low or wanted > high


def _store(slots: Float32Array, log_slot: Slot, slot: Slot, log_value: float) -> None:
    slots[log_slot] = log_value
    slots[slot] = math.exp(float(slots[log_slot]))
