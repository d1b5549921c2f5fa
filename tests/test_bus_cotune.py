"""The contract of `cotune`, for `HostBus` and `CudaBus` alike. Steered by slot 420 with blend 1, H is what we say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cotuned.wire.slots import Slot, TunerStatus
from tests.bus_contract import BUSES, Bench, same

Open = Callable[..., Bench]
ULP = 2.0**-24  # half a unit in the last place of a float32, relative


@pytest.fixture(params=BUSES)
def bench(request: pytest.FixtureRequest) -> Open:
    return lambda *args, **kwargs: Bench(request.param, *args, **kwargs)


@pytest.fixture
def steered(bench: Open) -> Open:
    """A bus whose tuner follows the policy entropy that `cotune` is told, unsmoothed."""
    return lambda **kwargs: bench(blend=1.0, source="policy", **kwargs)


def alpha_tau(slots: npt.NDArray[np.float32]) -> tuple[float, float]:
    return float(slots[Slot.ALPHA]), float(slots[Slot.TAU])


def test_waits_for_the_first_observation(bench: Open) -> None:
    b = bench(alpha_initial=0.3, tau_initial=2.0, pool=100)
    b.push([1] * 99)
    state = b.bus.cotune(0, None)
    assert state.slots[Slot.TUNER_STATUS] == TunerStatus.WAITING
    assert alpha_tau(state.slots) == pytest.approx((0.3, 2.0), rel=1e-6)
    assert state.slots[Slot.EFFECTIVE_TARGET] == np.float32(0.98 * math.log(11))
    assert b.counters() == {"BATCHES_TRAIN": 1, "ACTIONS_TRAIN": 99}


def test_moves_once_for_an_observation_and_holds_without_a_new_one(bench: Open) -> None:
    b = bench()
    b.push([5] * 10)
    first = b.bus.cotune(0, None)
    assert first.slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
    second = b.bus.cotune(0, None)
    assert second.slots[Slot.TUNER_STATUS] == TunerStatus.HELD
    assert alpha_tau(second.slots) == alpha_tau(first.slots)
    b.push([5] * 10, [5] * 10)
    assert b.bus.cotune(0, None).slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
    assert b.bus.cotune(0, None).slots[Slot.TUNER_STATUS] == TunerStatus.HELD
    assert b.counters() == {
        "OBSERVATIONS": 3,
        "SOURCE_SEEN": 3,
        "UPDATES": 2,
        "BATCHES_TRAIN": 3,
        "ACTIONS_TRAIN": 30,
    }


def test_all_hold_from_the_first_step_still_tunes(bench: Open) -> None:
    b = bench()
    last = alpha_tau(b.bus.row(0).slots)
    for _ in range(50):
        b.push([5] * 64)
        state = b.bus.cotune(0, None)
        assert state.slots[Slot.RL_ACTION_ENTROPY_EMA_INDEX] == 0.0
        assert state.slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
        now = alpha_tau(state.slots)
        assert now[0] > last[0]
        assert now[1] > last[1]
        last = now


@pytest.mark.parametrize(("entropy", "target", "sign"), [(1.0, 2.0, 1), (2.0, 1.0, -1)])
def test_direction(steered: Open, entropy: float, target: float, sign: int) -> None:
    b = steered(target_entropy=target, alpha_initial=0.2, tau_initial=1.0)
    state = b.bus.cotune(0, entropy)
    assert state.slots[Slot.ENTROPY_ERROR] == target - entropy
    assert state.slots[Slot.LOG_TAU] == np.float32(0.01 * sign)
    assert float(state.slots[Slot.LOG_ALPHA]) == pytest.approx(math.log(0.2) + 3e-4 * sign, abs=1e-6)
    for slot, log_slot in ((Slot.ALPHA, Slot.LOG_ALPHA), (Slot.TAU, Slot.LOG_TAU)):
        assert float(state.slots[slot]) == pytest.approx(math.exp(float(state.slots[log_slot])), rel=2 * ULP)


def test_policy_entropy_is_an_ema_of_its_own(bench: Open) -> None:
    b = bench(blend=0.4)
    b.push([0, 1])
    slot = Slot.RL_POLICY_ENTROPY_EMA_INDEX
    assert b.bus.cotune(0, 2.0).slots[slot] == 2.0
    assert b.bus.cotune(0, None).slots[slot] == 2.0
    assert float(b.bus.cotune(0, 1.0).slots[slot]) == pytest.approx(0.6 * 2 + 0.4 * 1, abs=1e-6)
    assert b.counters()["POLICY_OBSERVATIONS"] == 2
    assert b.counters()["UPDATES"] == 1  # steered by slot 583, which moved once


@pytest.mark.parametrize("source", ["policy", "conditional"])
def test_other_sources(bench: Open, source: str) -> None:
    b = bench(source=source, target_entropy=1.0)
    b.push([5] * 10)
    assert b.bus.cotune(0, None).slots[Slot.TUNER_STATUS] == TunerStatus.WAITING
    b.drain((0, [1, 2], None, 1.5))
    state = b.bus.cotune(0, 0.75)
    assert state.slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
    assert state.slots[Slot.ENTROPY_ERROR] == 0.25


def test_runs_do_not_meet(bench: Open) -> None:
    b = bench(3)
    for row in range(3):
        b.push([0, 1, 2], row=row)
    before = [b.bus.row(row) for row in range(3)]
    b.bus.cotune(1, 1.0)
    assert [same(before[row], b.bus.row(row)) for row in range(3)] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False])
def test_bounds_do_not_wind_up(steered: Open, up: bool) -> None:
    b = steered(target_entropy=1.0, alpha_min=0.1, alpha_max=0.4, tau_min=0.5, tau_max=2.0)
    low_h, high_h = (0.5, 1.5) if up else (1.5, 0.5)
    for _ in range(10**5):
        b.bus.cotune(0, low_h)
    slots = b.bus.row(0).slots
    bounds = (0.4, 2.0) if up else (0.1, 0.5)
    assert slots[Slot.TUNER_STATUS] == TunerStatus.AT_BOUND
    assert alpha_tau(slots) == pytest.approx(bounds, rel=1e-6)
    assert b.counters()["UPDATES"] == 10**5
    for _ in range(100):
        slots = b.bus.cotune(0, high_h).slots
    assert slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
    for value, bound in zip(alpha_tau(slots), bounds, strict=True):
        assert value < bound * (1 - 1e-3) if up else value > bound * (1 + 1e-3)


def test_a_rate_of_zero_keeps_its_value(steered: Open) -> None:
    b = steered(target_entropy=1.0, lr_alpha=0.0)
    start = alpha_tau(b.bus.row(0).slots)
    after = alpha_tau(b.bus.cotune(0, 0.5).slots)
    assert after[0] == start[0]
    assert after[1] > start[1]


def test_configured_rates_reach_the_kernel_exactly(steered: Open) -> None:
    target = 2.0
    told = [h for h in np.linspace(0.1, 1.9, 4001).astype(np.float32).tolist() if _rounds_apart(0.1, target - h)]
    assert len(told) > 100
    b = steered(target_entropy=target, lr_tau=0.1, lr_alpha=3e-4)
    for h in told[:20]:
        b.open(0)
        slots = b.bus.cotune(0, h).slots
        assert slots[Slot.LOG_TAU] == np.float32(0.1 * (target - h))
        wanted = math.log(0.2)
        step = 3e-4 * (target - h) / (math.sqrt((target - h) ** 2) + 1e-8)
        assert slots[Slot.LOG_ALPHA] == np.float32(float(np.float32(wanted)) + step)


def _rounds_apart(rate: float, error: float) -> bool:
    return np.float32(rate * error) != np.float32(float(np.float32(rate)) * error)


class Adam:
    """Adam on −log α · e in float64, as Kingma and Ba (2015), algorithm 1, state it."""

    def __init__(self, rate: float, log_alpha: float) -> None:
        self.rate, self.log_alpha, self.t, self.m, self.v = rate, log_alpha, 0, 0.0, 0.0

    def step(self, error: float) -> float:
        gradient = -error
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.log_alpha -= self.rate * m / (math.sqrt(v) + 1e-8)
        return self.log_alpha


def test_adam_against_float64(steered: Open) -> None:
    """Two checks. Each step, started from the bus's own float32 state, lands within half a float32 unit (and the 1e-6
    relative that half a unit of the moments can do to a step). Over all steps those roundings (6e-8 · |log α| each) add
    up like a random walk, to about 2e-6 after 1 000: 2e-5 holds even where they conspire a little."""
    b = steered(target_entropy=1.0, lr_alpha=3e-4)
    free = Adam(3e-4, float(b.slot(Slot.LOG_ALPHA)))
    told = np.random.default_rng(5).uniform(0.01, 2.3, 1000).astype(np.float32).tolist()
    before = b.bus.row(0).slots
    for h in told:
        one = Adam(3e-4, float(before[Slot.LOG_ALPHA]))
        one.t, one.m, one.v = free.t, float(before[Slot.ALPHA_FIRST_MOMENT]), float(before[Slot.ALPHA_SECOND_MOMENT])
        one.step(1.0 - h)
        free.step(1.0 - h)
        now = b.bus.cotune(0, h).slots
        for slot, expected in (
            (Slot.LOG_ALPHA, one.log_alpha),
            (Slot.ALPHA_FIRST_MOMENT, one.m),
            (Slot.ALPHA_SECOND_MOMENT, one.v),
        ):
            assert abs(float(now[slot]) - expected) <= 1.01 * ULP * abs(expected)
        before = now
    assert math.isfinite(float(before[Slot.LOG_ALPHA]))
    assert abs(float(before[Slot.LOG_ALPHA]) - free.log_alpha) < 2e-5
    assert abs(free.log_alpha - math.log(0.2)) > 1e-3  # it went somewhere


@pytest.mark.parametrize("seed", range(3))
def test_alpha_stays_positive_and_its_log_finite(steered: Open, seed: int) -> None:
    rng = np.random.default_rng(seed)
    extremes: dict[str, Any] = {"lr_alpha": 5.0, "lr_tau": 50.0, "alpha_min": 1e-6, "alpha_max": 1e6, "tau_max": 1e6}
    b = steered(target_entropy=1.0, **extremes)
    for _ in range(300):
        state = b.bus.cotune(0, float(rng.uniform(0, math.log(11))))
        assert np.isfinite(state.slots).all()
        assert state.slots[Slot.ALPHA] > 0
        assert state.slots[Slot.TAU] > 0
        assert 1e-6 * (1 - 1e-6) <= state.slots[Slot.ALPHA] <= 1e6 * (1 + 1e-6)


def test_a_policy_entropy_of_zero_is_a_report(steered: Open) -> None:
    b = steered(target_entropy=1.0)
    state = b.bus.cotune(0, 0.0)
    assert state.slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
    assert state.slots[Slot.ENTROPY_ERROR] == 1.0


@pytest.mark.parametrize("bound", ["alpha_min", "alpha_max"])
def test_standing_on_a_bound_is_not_pushing_against_it(steered: Open, bound: str) -> None:
    b = steered(target_entropy=1.0, alpha_initial=0.1, lr_alpha=0.0, lr_tau=0.0, **{bound: 0.1})
    assert b.bus.cotune(0, 0.5).slots[Slot.TUNER_STATUS] == TunerStatus.UPDATED
